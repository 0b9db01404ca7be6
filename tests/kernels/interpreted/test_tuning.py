"""Candidates are checked and timed before one is chosen, on the CPU as a device, with a planted clock."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from fastdpo import NotFused, ops
from fastdpo.kernels import token_logps
from fastdpo.ops import definitions
from fastdpo.ops.attention import routes
from fastdpo.ops.choice import notes, tuning, verdicts
from fastdpo.ops.choice.tuning import Candidate
from fastdpo.ops.choice.verdicts import Kernel
from fastdpo.ops.head import passes, row_warps
from tests.support.faults import raising

CPU = torch.device("cpu")
CALL = Kernel("op", CPU, torch.bfloat16, ("D 8",))
FEW, WHOLE = "8 warps", "32 warps"


VERDICTS = {}
"""Those of the tests in which no kernel fails."""


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(verdicts, "failures", {})
    monkeypatch.setattr(verdicts, "reported", set())


@pytest.fixture(autouse=True)
def tuned(monkeypatch, tmp_path):
    """Tunes calls on the CPU, in a new process as far as they are concerned."""
    monkeypatch.setattr(tuning, "TUNED_DEVICES", ("cpu",))
    monkeypatch.setattr(verdicts, "TRIED_DEVICES", ("cpu",))
    monkeypatch.setattr(verdicts, "failures", VERDICTS)
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    for name in (tuning.VARIABLE, "FASTDPO_STRICT", routes.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(row_warps, "LEAST_TUNED", 0)
    monkeypatch.setattr(passes, "kernel_tile_rows", lambda *arguments: 8)
    monkeypatch.setattr(routes, "LEAST_TUNED", 0)
    tuning.choices.clear()
    yield
    tuning.choices.clear()


@pytest.fixture
def clock(monkeypatch):
    """Plants the milliseconds of candidates, which run nevertheless. Returns the names of those that were run."""

    def plant(times):
        ran = []

        def milliseconds(candidate, device):
            candidate.run()
            ran.append(candidate.name)
            return times[candidate.name]

        monkeypatch.setattr(tuning, "milliseconds", milliseconds)
        return ran

    return plant


def candidate(name, run=lambda: None, failure=None):
    return Candidate(name, run, lambda: failure)


def choose(*candidates, builtin="a"):
    return tuning.choose(CALL, builtin, lambda: candidates)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"a": 10.0, "b": 9.0, "c": 8.0}, "c"),
        ({"a": 10.0, "b": 9.9, "c": 12.0}, "a"),  # faster by less than the noise
    ],
)
def test_the_fastest_candidate_is_chosen(times, chosen, clock, caplog):
    caplog.set_level("INFO", "fastdpo")
    ran = clock(times)
    assert choose(*map(candidate, times)) == chosen
    assert len(ran) == 3 * (1 + tuning.ROUNDS)
    assert choose() == chosen
    assert len(ran) == 3 * (1 + tuning.ROUNDS)
    (message,) = caplog.messages
    assert message.startswith(f"fastdpo: op torch.bfloat16 D 8: {chosen} (a: 10.000 ms; b: ")


def test_a_candidate_with_wrong_values_or_that_does_not_compile_is_not_timed(clock):
    ran = clock({"a": 10.0, "b": 1.0})
    assert choose(candidate("a"), candidate("b", failure="wrong values on a small case")) == "a"
    assert "b" not in ran
    assert tuning.choices[CALL].measured == {"a": 10.0, "b": "wrong values on a small case"}


@pytest.mark.parametrize("builtin", "ab")
@pytest.mark.parametrize("runs", [0, 3])
def test_a_candidate_that_cannot_be_launched_is_not_chosen(runs, builtin, clock):
    launches = iter(range(9))

    def launch():
        if next(launches) >= runs:
            raise torch.OutOfMemoryError("at the size of the call")

    clock({"a": 10.0, "b": 1.0})
    assert choose(candidate("a"), candidate("b", run=launch), builtin=builtin) == "a"
    assert notes.read(CPU).choices[CALL.noted]["name"] == "a"
    assert tuning.choices[CALL].measured["b"] == "OutOfMemoryError: at the size of the call"


def test_what_none_can_run_keeps_the_builtin_choice_without_a_note(clock, tmp_path):
    clock({})
    broken = [candidate(name, run=raising(RuntimeError("no memory"))) for name in "ab"]
    assert choose(*broken) == "a"
    assert tuning.choices[CALL].timed == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("withdrawn", "remaining"), [("b", "c"), ("c", "b")])
def test_a_withdrawn_choice_is_replaced_by_the_next(withdrawn, remaining, clock, tmp_path):
    clock({"a": 10.0, "b": 8.0, "c": 9.0})
    assert choose(*map(candidate, "abc")) == "b"
    tuning.withdraw(CALL, withdrawn, "RuntimeError: no kernel image")
    assert choose() == remaining
    assert tuning.timed(CALL) == [remaining, "a"]
    tuning.choices.clear()
    assert choose(*map(candidate, "abc")) == remaining
    tuning.withdraw(Kernel("other", CPU, torch.bfloat16), "a", "unknown")  # not chosen here


def test_a_withdrawn_choice_without_another_one_is_measured_again(clock):
    clock({"a": 10.0, "b": 8.0})
    assert choose(*map(candidate, "ab")) == "b"
    for name in "ab":
        tuning.withdraw(CALL, name, "RuntimeError: no kernel image")
    assert tuning.timed(CALL) == []
    noted = notes.read(CPU).choices[CALL.noted]
    assert noted["measured"] == dict.fromkeys("ab", "RuntimeError: no kernel image")
    tuning.choices.clear()
    assert choose(*map(candidate, "ab")) == "b"
    assert tuning.timed(CALL) == ["b", "a"]


def test_a_choice_is_kept_for_later_processes(clock, tmp_path):
    ran = clock({"a": 10.0, "b": 8.0, "c": 9.0})
    choose(candidate("a"), candidate("b"))
    (path,) = tmp_path.iterdir()
    noted = {"name": "b", "measured": {"a": 10.0, "b": 8.0}}
    assert json.loads(path.read_text())["choices"] == {"op torch.bfloat16 D 8": noted}
    ran.clear()
    tuning.choices.clear()
    assert choose(candidate("a"), candidate("b")) == "b"
    assert not ran
    tuning.choices.clear()
    assert choose(candidate("a"), candidate("b"), candidate("c")) == "b"  # between others: measured again
    assert {*ran} == {"a", "b", "c"}


@pytest.mark.parametrize(
    "choice",
    [
        *(None, {}, {"name": "b"}, {"name": "b", "measured": ["b"]}, {"name": "d", "measured": {"a": 1.0, "b": 2.0}}),
        {"name": "a", "measured": {"a": "AssertionError: ", "b": 1.0}},  # it could not be run
    ],
)
def test_an_invalid_note_is_measured_again(choice, clock):
    clock({"a": 10.0, "b": 8.0})
    notes.note(CPU, choices={CALL.noted: choice})
    assert choose(candidate("a"), candidate("b")) == "b"
    assert notes.read(CPU).choices[CALL.noted]["name"] == "b"


def test_nothing_is_measured_while_a_graph_is_captured(clock, monkeypatch):
    ran = clock({})
    monkeypatch.setattr(tuning, "is_capturing", lambda device: True)
    assert choose(candidate("a"), candidate("b")) == "a"
    monkeypatch.setattr(tuning, "is_capturing", lambda device: False)
    assert choose(candidate("a"), candidate("b")) == "a"  # what the graph holds
    assert not ran


@pytest.fixture
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(tuning, "store_of_ranks", lambda: store)
    return store


@pytest.mark.parametrize("has_cache", [False, True])
def test_all_ranks_make_the_choice_of_the_first(has_cache, clock, store, monkeypatch, tmp_path):
    clock({"a": 10.0, "b": 8.0})
    assert choose(candidate("a"), candidate("b")) == "b"
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path / "of another machine") if has_cache else "0")
    if has_cache:  # one that differs
        notes.note(CPU, choices={CALL.noted: {"name": "a", "measured": {"a": 1.0, "b": 2.0}}})
    tuning.choices.clear()
    ran = clock({})
    assert choose(candidate("a"), candidate("b")) == "b"
    assert not ran
    if has_cache:
        assert notes.read(CPU).choices[CALL.noted]["name"] == "b"


def test_a_rank_takes_the_choice_that_another_has_made_meanwhile(clock, store):
    """Neither waits, so that a rank which fails while it measures holds up nobody."""
    clock({"a": 10.0, "b": 8.0, "c": 7.0})
    another = [candidate("a"), candidate("b")]
    mine = candidate("c", run=lambda: tuning.decided(CALL, "a", another))
    assert choose(candidate("a"), candidate("b"), mine) == "b"


def head(dtype=torch.float16):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 24, dtype=dtype), torch.randn(67, 24, dtype=dtype) / 24**0.5
    return hidden.requires_grad_(), weight, torch.tensor([1, 5, -100, 66, 0])


def gradient_of_head(op, tensors):
    hidden, weight, targets = (x.detach() for x in tensors)
    logps = op(hidden.requires_grad_(), weight, targets).logps
    return logps.detach(), *torch.autograd.grad(logps.sum(), hidden)


def assert_head_is_right():
    tensors = head()
    exact = gradient_of_head(definitions.linear_logps, [x.double() if x.is_floating_point() else x for x in tensors])
    for found, expected in zip(gradient_of_head(ops.linear_logps, tensors), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)


def warps_of_head():
    return f"{passes.TileFormat.of(head()[1], torch.float16).row_warps or token_logps.NUM_WARPS} warps"


@pytest.fixture
def one_round(monkeypatch):
    monkeypatch.setattr(tuning, "ROUNDS", 1)


TIMES = {FEW: 10.0, WHOLE: 8.0}


@pytest.mark.parametrize("fastest", TIMES)
def test_a_head_runs_its_fastest_kernels(fastest, clock, one_round):
    ran = clock(TIMES | {fastest: 5.0})
    assert_head_is_right()
    assert {*ran} == {*TIMES}
    assert warps_of_head() == fastest


def of_many_warps(replace):
    """A launcher that does something else with more warps than the default."""

    def run(*arguments, **options):
        many = 32 in [options.get("warps"), *(x for x in arguments if type(x) is int)]
        return (replace if many else LAUNCH)(*arguments, **options)

    return run


def off_by_a_percent(*arguments, **options):
    logps, *others = LAUNCH(*arguments, **options)
    return [logps * 1.01, *others]


def fails_at_the_size_of_the_head(logits, *arguments, **options):
    if logits.shape[1] == 67:
        raise RuntimeError("invalid argument")
    return LAUNCH(logits, *arguments, **options)


LAUNCH = token_logps.token_logps_fwd


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (off_by_a_percent, "wrong values on a small case: logps is off by"),
        (raising(TypeError("at 12:4: tl.dot")), "TypeError: at 12:4: tl.dot"),
        (fails_at_the_size_of_the_head, "RuntimeError: invalid argument"),
    ],
    ids=["wrong values", "does not compile", "does not launch"],
)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_head_does_not_run_warps_that_fail(untried, strict, fault, reason, clock, one_round, monkeypatch, caplog):
    monkeypatch.setenv("FASTDPO_STRICT", strict)
    monkeypatch.setattr(token_logps, "token_logps_fwd", of_many_warps(fault))
    clock(TIMES)
    assert_head_is_right()
    assert warps_of_head() == FEW
    (choice,) = tuning.choices.values()
    assert choice.measured[WHOLE].startswith(reason)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def chosen_warps(clock, one_round, monkeypatch):
    """A head that has chosen the kernel with 32 warps, in a training that goes on."""
    clock(TIMES)
    warps_of_head()  # tries the kernels once for all tests
    monkeypatch.setattr(verdicts, "failures", dict(VERDICTS))
    monkeypatch.setattr(verdicts, "reported", set())
    assert_head_is_right()
    assert warps_of_head() == WHOLE


def fails_in_a_step(monkeypatch, launcher="token_logps_fwd", wrap=lambda fails: fails):
    """Plants a launch that fails at the size of the head, and counts its calls."""
    launch, calls = getattr(token_logps, launcher), []

    def fails(*arguments, **options):
        if arguments[0].shape[1] == 67:
            calls.append(1)
            raise RuntimeError("invalid argument")
        return launch(*arguments, **options)

    monkeypatch.setattr(token_logps, launcher, wrap(fails))
    return calls


def test_warps_that_fail_in_a_step_are_replaced_once(chosen_warps, monkeypatch, caplog):
    calls = fails_in_a_step(monkeypatch, wrap=of_many_warps)
    for _ in range(2):
        assert_head_is_right()
        assert warps_of_head() == FEW
    assert len(calls) == 1
    failed = f"the kernel with {WHOLE} has failed and is replaced by that with {FEW}: RuntimeError: invalid argument"
    assert caplog.messages == [f"fastdpo: linear_logps: {failed}"]
    (noted,) = notes.read(CPU).choices.values()
    assert noted == {"name": FEW, "measured": TIMES | {WHOLE: "RuntimeError: invalid argument"}}
    tuning.choices.clear()
    assert_head_is_right()
    assert warps_of_head() == FEW
    assert len(calls) == 1


def test_a_head_whose_kernels_all_fail_in_a_step_is_computed_by_pytorch(chosen_warps, monkeypatch, caplog):
    """Unless in strict mode, in which it raises."""
    calls = fails_in_a_step(monkeypatch)
    for _ in range(2):
        assert_head_is_right()
    assert len(calls) == 2
    assert [message.partition(" on ")[0] for message in caplog.messages[1:]] == [
        "fastdpo: the kernel token_logps is disabled"
    ]
    assert not passes.TileFormat.of(head()[1], torch.float16).triton
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with pytest.raises(NotFused, match=r"the kernel token_logps is disabled .*RuntimeError: invalid argument"):
        assert_head_is_right()


@pytest.mark.parametrize("wanted", ["logps", "entropy"])
def test_a_backward_that_fails_in_a_step_is_computed_by_pytorch(wanted, chosen_warps, monkeypatch, caplog):
    calls = fails_in_a_step(monkeypatch, "token_logps_bwd")
    hidden, weight, targets = head()
    weight.requires_grad_()
    gradients = []
    for op, options in ((ops.linear_logps, dict(memory_budget=0)), (definitions.linear_logps, {})):
        results = op(hidden, weight, targets, outputs=("logps", "entropy"), **options)
        gradients.append(torch.autograd.grad(getattr(results, wanted).sum(), (hidden, weight)))
    for found, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(found, exact, rtol=5e-3, atol=5e-3)
    assert len(calls) == 1
    assert "the kernel token_logps is disabled on cpu" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("10 GiB"), RuntimeError("while a graph is captured")])
def test_an_error_that_is_no_fault_of_a_kernel_is_raised(error, chosen_warps, monkeypatch, caplog):
    monkeypatch.setattr(passes, "is_capturing", lambda device: True)
    monkeypatch.setattr(token_logps, "token_logps_fwd", raising(error))
    with pytest.raises(type(error), match=str(error)):
        ops.linear_logps(*head())
    assert not caplog.messages
    assert warps_of_head() == WHOLE


def test_warps_that_are_noted_are_checked_again(untried, clock, monkeypatch, caplog):
    """The file of a choice may come from elsewhere."""
    notes.note(CPU, choices={"linear_logps torch.float16 V 67 D 24": tuning.Choice(WHOLE, TIMES)._asdict()})
    monkeypatch.setattr(token_logps, "token_logps_fwd", of_many_warps(off_by_a_percent))
    ran = clock({})
    assert_head_is_right()
    assert warps_of_head() == FEW
    assert not ran
    assert "the kernel token_logps is disabled" in caplog.text


@pytest.fixture(params=["FASTDPO_TUNE", "deterministic"])
def pinned(request, monkeypatch):
    if request.param == "deterministic":
        torch.use_deterministic_algorithms(True)
    else:
        monkeypatch.setenv(request.param, "0")
    yield
    torch.use_deterministic_algorithms(False)


def test_a_pinned_head_is_not_tuned(pinned, clock):
    ran = clock({})
    assert warps_of_head() == FEW
    assert not ran


def test_modes_of_the_call_do_not_see_what_is_timed(clock, one_round):
    clock(TIMES)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False) as counted:
        ops.linear_logps(*head())
    assert counted.get_total_flops() <= 2 * 2 * 5 * 67 * 24  # one product, and the targets' logits


@pytest.mark.parametrize("noted", [None, FEW, WHOLE])
def test_a_compiled_head_is_not_tuned_while_it_is_traced(noted, clock, one_round, caplog):
    ran = clock(TIMES | {noted: 5.0})
    if noted is not None:
        warps_of_head()
        ran.clear()
        tuning.choices.clear()
    torch.compiler.reset()
    compiled = torch.compile(ops.linear_logps, fullgraph=True, backend="aot_eager")
    found, exact = (op(*head()).logps for op in (compiled, definitions.linear_logps))
    torch.testing.assert_close(found, exact.float(), rtol=2e-3, atol=2e-3)
    assert warps_of_head() == (noted or FEW)
    assert not ran


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_sizes_are_rounded_up_to_a_power_of_two(size, power):
    assert tuning.bucket(size) == power
