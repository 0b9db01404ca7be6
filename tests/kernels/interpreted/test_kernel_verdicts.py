"""Kernels are tried before their first use on a device, for which the CPU stands in, and disabled if they fail."""

import json
from functools import partial

import pytest
import torch

from fastdpo import NotFused, ops
from fastdpo.kernels import linear_logps as head_kernels
from fastdpo.kernels import packed_attention_backward, token_logps
from fastdpo.ops import definitions
from fastdpo.ops.attention import routes
from fastdpo.ops.attention import trials as attention_trials
from fastdpo.ops.attention.triton_backend import TritonBackend
from fastdpo.ops.choice import notes, verdicts
from fastdpo.ops.choice.verdicts import Kernel
from fastdpo.ops.head import trials as head_trials
from tests.support.faults import raising

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16)
CALL = partial(TritonBackend().call, least_turns=1)
TRIALS = {
    "token_logps": head_trials.token_logps,
    **{f"rows of a head, {kind}": partial(head_trials.rows, kind=kind) for kind in head_trials.TRANSFORMS},
    "rows of a head, 32 warps": partial(head_trials.rows, warps=32),
    "target_logits": head_trials.target_logits,
    "target_logits, every option": partial(head_trials.target_logits, kind="capped", biased=True),
    "attention": partial(attention_trials.packed_attention, CALL, d=16, d_v=16),
    "attention, every option": partial(
        attention_trials.packed_attention, CALL, d=24, d_v=8, heads=2, windowed=True, capped=True
    ),
}


class OutOfResources(RuntimeError):
    """As Triton's."""


def changed(launch, change):
    """A launcher whose results are changed."""

    def launch_and_change(*args, **kwargs):
        results = launch(*args, **kwargs)
        change(args, results)
        return results

    return launch_and_change


def off_by_a_percent(args, results):
    results[0].mul_(1.01)


def past_the_end(args, results):
    """Adds the column behind the logits, as a kernel without a mask does."""
    logits = args[0]
    results[0].add_(logits.as_strided((len(logits),), (logits.stride(0),), logits.storage_offset() + logits.shape[1]))


def writes_behind_its_result(args, results):
    grad = args[0]
    grad.as_strided((1,), (1,), grad.storage_offset() + grad.shape[1]).fill_(0)


FAULTS = {  # module, launcher, what happens instead, part of the reason
    "wrong values": (token_logps, "token_logps_fwd", off_by_a_percent, "wrong values on a small case: logps is off by"),
    "reads neighbours": (token_logps, "token_logps_fwd", past_the_end, "logps is off by nan"),
    "writes neighbours": (token_logps, "token_logps_bwd", writes_behind_its_result, "memory around the gradient"),
    "does not compile": (token_logps, "token_logps_fwd", TypeError("at 12:4: tl.dot"), "TypeError: at 12:4: tl.dot"),
    "does not fit": (token_logps, "token_logps_bwd", OutOfResources("shared memory"), "OutOfResources: shared memory"),
    "does not launch": (token_logps, "token_logps_bwd", RuntimeError("invalid argument"), "invalid argument"),
}


def forget():
    verdicts.failures.clear()
    verdicts.reported.clear()
    verdicts.announce.cache_clear()


@pytest.fixture(autouse=True)
def tried(monkeypatch, tmp_path):
    """Tries kernels on the CPU, in a new process as far as they are concerned."""
    monkeypatch.setattr(verdicts, "TRIED_DEVICES", ("cpu",))
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    monkeypatch.delenv("FASTDPO_STRICT", raising=False)
    notes.warn_unwritable.cache_clear()
    forget()
    yield
    forget()


@pytest.fixture
def plant(monkeypatch):
    def plant_fault(name):
        module, launcher, fault, reason = FAULTS[name]
        launch = raising(fault) if isinstance(fault, Exception) else changed(getattr(module, launcher), fault)
        monkeypatch.setattr(module, launcher, launch)
        return reason

    return plant_fault


def logps_and_gradient(op=ops.token_logps):
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 67, requires_grad=True), torch.tensor([1, 5, -100, 66, 0])
    logps = op(logits, targets).logps
    return logps.detach(), *torch.autograd.grad(logps.sum(), logits)


def in_another_process():
    forget()
    logps_and_gradient()


def assert_right():
    for found, exact in zip(logps_and_gradient(), logps_and_gradient(definitions.token_logps), strict=True):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TRIALS)
def test_a_kernel_that_works_passes(name, dtype):
    assert verdicts.outcome(TRIALS[name], CPU, dtype) is None


def test_the_wait_for_the_first_kernels_is_announced(caplog):
    with caplog.at_level("INFO", "fastdpo"):
        logps_and_gradient()
        assert caplog.messages == ["fastdpo: compiling and trying kernels on cpu (cpu); the first batch waits for them"]
        caplog.clear()
        in_another_process()
    assert not caplog.records  # the notes of the first process spare it the trial


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_fails_is_replaced_with_one_warning(fault, plant, caplog, launches):
    reason = plant(fault)
    assert_right()
    launches.clear()
    assert_right()
    assert not launches
    (message,) = caplog.messages
    assert message.startswith("fastdpo: the kernel token_logps is disabled on cpu (cpu), torch.float32, and PyTorch")
    assert reason in message


@pytest.mark.parametrize("fault", ["wrong values", "does not fit"])
def test_in_strict_mode_every_call_raises(fault, plant, monkeypatch):
    reason = plant(fault)
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    for _ in range(2):
        with pytest.raises(NotFused, match=f"the kernel token_logps is disabled on cpu.*{reason}"):
            logps_and_gradient()


def test_one_kernel_of_a_head_that_fails_disables_its_tiles_only(monkeypatch, caplog, launches):
    monkeypatch.setattr(head_kernels, "target_logits", changed(head_kernels.target_logits, off_by_a_percent))
    hidden, weight, targets = torch.randn(5, 8), torch.randn(67, 8), torch.tensor([1, 5, -100, 66, 0])
    mine, exact = (op(hidden, weight, targets).logps for op in (ops.linear_logps, definitions.linear_logps))
    torch.testing.assert_close(mine, exact)
    assert "kernel target_logits is disabled" in caplog.text
    assert "kernel token_logps is disabled" not in caplog.text
    assert_right()  # which tries the kernel for logits that are given
    launches.update(token_logps_fwd=0)
    assert_right()
    assert launches["token_logps_fwd"] == 1


@pytest.mark.parametrize("launcher", ["packed_attention_bwd", "sum_places"])  # the latter is launched in the trial only
def test_attention_that_fails_is_computed_in_pieces(launcher, monkeypatch, caplog):
    monkeypatch.setattr(packed_attention_backward, launcher, raising(OutOfResources("shared memory")))
    query, key = torch.randn(9, 4, 8, requires_grad=True), torch.randn(9, 2, 8)
    rows = torch.tensor([[0, 0, 0, 5], [0, 4, 5, 4]], dtype=torch.int32)
    gradients = []
    for op in (ops.packed_attention, ops.packed_attention, definitions.packed_attention):
        gradients += torch.autograd.grad(op(query, key, key, rows).square().sum(), query)
    torch.testing.assert_close(gradients[0], gradients[2])
    (message,) = caplog.messages
    assert "kernel packed_attention is disabled" in message
    assert "d 8, d_v 8, heads 4, key_heads 2, windowed False, capped False" in message
    monkeypatch.setenv(routes.VARIABLE, "triton")
    with pytest.raises(NotImplementedError, match="got triton: it is disabled, as logged"):
        ops.packed_attention(query, key, key, rows)


def counting(monkeypatch, outcome=lambda *arguments: None):
    """The number of trials so far, in a list. They find that kernels work, if they are not run."""
    trials = []
    monkeypatch.setattr(verdicts, "outcome", lambda *arguments: trials.append(1) or outcome(*arguments))
    return trials


def test_a_kernel_is_tried_once_in_a_process_and_once_on_a_machine(monkeypatch, tmp_path):
    trials = counting(monkeypatch, verdicts.outcome)
    for _ in range(2):
        logps_and_gradient()
    assert len(trials) == 1
    in_another_process()
    assert len(trials) == 1
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["passed"] == ["token_logps torch.float32"]


@pytest.mark.parametrize("name", ["device", "architecture", "driver", "torch", "triton", "fastdpo"])
def test_a_change_of_the_environment_tries_again(name, monkeypatch):
    trials = counting(monkeypatch)
    logps_and_gradient()
    changed_environment = notes.environment(CPU) | {name: "other"}
    monkeypatch.setattr(notes, "environment", lambda device: changed_environment)
    in_another_process()
    assert len(trials) == 2


def test_a_failure_is_not_noted(plant, monkeypatch, tmp_path):
    trials = counting(monkeypatch, verdicts.outcome)
    plant("does not fit")
    for _ in range(2):
        in_another_process()
    assert len(trials) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 0}', '{"format": 2, "environment": {}, "passed": []}'])
def test_an_unreadable_file_is_replaced(content, monkeypatch, tmp_path):
    trials = counting(monkeypatch)
    logps_and_gradient()
    (path,) = tmp_path.iterdir()
    noted = path.read_text()
    path.write_text(content)
    in_another_process()
    assert len(trials) == 2
    assert path.read_text() == noted


def test_a_directory_that_cannot_be_written_costs_the_file_and_one_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path / "file" / "cache"))
    trials = counting(monkeypatch)
    for _ in range(2):
        in_another_process()
    assert len(trials) == 2
    assert caplog.text.count("each process tries the kernels again") == 1


@pytest.mark.parametrize("directory", ["0", "~no-such-user/cache"])
def test_the_file_can_be_switched_off(directory, monkeypatch, tmp_path):
    """Containers may run as a user who has no home directory."""
    monkeypatch.setenv(notes.VARIABLE, directory)
    monkeypatch.chdir(tmp_path)
    logps_and_gradient()
    assert not list(tmp_path.iterdir())


def test_nothing_is_tried_on_a_cpu_or_while_a_graph_is_captured(plant, monkeypatch):
    trials = counting(monkeypatch, verdicts.outcome)
    plant("wrong values")
    monkeypatch.setattr(verdicts, "is_capturing", lambda device: True)
    logps_and_gradient()
    monkeypatch.setattr(verdicts, "is_capturing", lambda device: False)
    monkeypatch.setattr(verdicts, "TRIED_DEVICES", ("cuda",))
    logps_and_gradient()
    assert not trials
    monkeypatch.setattr(verdicts, "TRIED_DEVICES", ("cpu",))
    logps_and_gradient()
    assert trials == [1]  # nothing was known of the kernel


def test_a_trial_is_independent_of_where_a_kernel_is_first_used():
    state = torch.random.get_rng_state()
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert verdicts.works(Kernel("token_logps", CPU, torch.float32), head_trials.token_logps)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("trained", [False, True])
def test_a_compiled_head_tries_its_kernels_while_it_is_traced(trained, monkeypatch, caplog):
    trials = counting(monkeypatch, verdicts.outcome)
    torch.compiler.reset()
    hidden, weight, targets = torch.randn(5, 8), torch.randn(67, 8, requires_grad=trained), torch.randint(67, (5,))
    compiled = torch.compile(ops.linear_logps, fullgraph=True, backend="aot_eager")
    found, exact = (op(hidden, weight, targets).logps for op in (compiled, definitions.linear_logps))
    torch.testing.assert_close(found, exact)
    assert len(trials) == 2
    assert "fastdpo:" not in caplog.text
