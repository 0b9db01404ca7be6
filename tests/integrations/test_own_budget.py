"""`patch()`: by default, the batches of a step are trained on in fewer, larger ones, where nothing can tell.

`test_option` of test_trl_budget.py compares the options of each trainer with stock.
"""

import contextlib
import functools
import re

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainerCallback

import fastdpo
from fastdpo.integrations import line, outcomes
from fastdpo.integrations.bypass import STATE
from fastdpo.integrations.trl.max_tokens.budget import Budget
from fastdpo.integrations.trl.max_tokens.learned_tokens import LearnedTokens
from fastdpo.integrations.trl.max_tokens.steps import StepBudget
from fastdpo.models import calls as counters
from fastdpo.ops import memory
from fastdpo.ops.memory import MemoryReport
from tests.integrations.test_learned_tokens import ACCUMULATED, TOTAL, Stand, learn
from tests.integrations.test_max_tokens_refused import BATCHES, CODE, MODELS, REFUSED
from tests.integrations.test_trl_budget import CLASSES, with_padding
from tests.support.comparison import assert_same_bits, double
from tests.support.copies import change, set_newer
from tests.support.recorded_calls import recorded_calls
from tests.support.stand_ins.device_memory import DeviceMemory
from tests.support.trl.dpo import DPO as DPO_RECIPE
from tests.support.trl.dpo import WORDS, adapter, long_pairs, tiny_model, train
from tests.support.trl.resuming import assert_resumes
from tests.support.workers.budgets import (
    DPO,
    GROUPS,
    KTO,
    REWARD,
    TRAINERS,
    assert_cut_alike,
    compared,
    trained,
    with_and_without,
)


def kept(caplog) -> list[str]:
    """The reasons that were logged for which a trainer keeps its batches."""
    return re.findall(r"keeps the batches of TRL(?:,| because of) (.*)", caplog.text)


@pytest.fixture(autouse=True)
def at_level_info(caplog):
    caplog.set_level("INFO", "fastdpo")
    counters.outcomes.clear()


@pytest.mark.parametrize("trainer", GROUPS)
def test_groups(tmp_path, caplog, trainer):
    patched = compared(tmp_path, trainer, "own")
    assert {path for _, path in patched.calls} == {"fused"}
    assert not kept(caplog)
    assert 0 < counters.outcomes[trainer, "micro-batches"] < 4 * counters.outcomes[trainer, "steps"]


SEEN = {**CODE, **MODELS, **BATCHES}
NOT_TRAINED = "training_step", "a reference without tokens"
"""Without gradients, and with losses that are not numbers in stock."""


@pytest.mark.parametrize(
    "case", [*SEEN, *(name for name in REFUSED if name not in SEEN and not name.endswith(NOT_TRAINED))]
)
def test_what_would_see_other_batches_keeps_them(tmp_path, caplog, case):
    trainer, options, reason = REFUSED[case]
    compared(tmp_path, trainer, "own", **options)
    assert re.match(reason, kept(caplog)[0])
    assert len(kept(caplog)) == 1
    assert not counters.outcomes[trainer, "steps"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_empty_mask_keeps_the_batches(tmp_path, caplog, trainer):
    masked = with_padding(CLASSES[trainer], lambda ids, mask: torch.arange(len(ids))[:, None] != 1)
    assert_cut_alike(trainer, *with_and_without(tmp_path, trainer, "own", trainer_class=masked))
    assert kept(caplog) == ["rows whose attention mask is 0"]


@pytest.mark.parametrize("parts", [dict(lora_dropout=0.3), dict(attention_dropout=0.3)])
def test_with_dropout_random_numbers_are_those_of_the_batches(tmp_path, caplog, parts):
    given = adapter(**parts) if "lora_dropout" in parts else dict(tiny=parts)
    assert_same_bits(*with_and_without(tmp_path, DPO, "own", disable_dropout=False, **given))
    assert len(kept(caplog)) == 1


@pytest.mark.parametrize(("options", "packed"), [({}, False), (adapter(lora_dropout=0.3), True)])
def test_batches_that_are_kept_come_with_their_layouts(tmp_path, monkeypatch, options, packed):
    """Those of a step that is cut are packed after it was."""
    made = recorded_calls(monkeypatch, line, "packing_batches")
    with fastdpo.patched(DPO):
        trained(tmp_path, DPO, disable_dropout=False, **options)
    assert bool(made) == packed


def test_a_hook_sees_as_many_calls_as_in_stock(tmp_path):
    calls: list = []

    def counted(model):
        model.register_forward_hook(lambda *args: calls.append(model.training))
        return double(model)

    trained(tmp_path / "stock", DPO, prepare=counted)
    stock = calls.copy()
    calls.clear()
    with fastdpo.patched(DPO):
        trained(tmp_path / "patched", DPO, prepare=counted)
    assert calls.count(True) == stock.count(True) > 0


def test_a_step_with_a_pair_without_numbers(tmp_path):
    """A callback that cleans gradients gets those of stock. Only the loss of the whole step is not a number."""

    class Cleans(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for x in model.parameters():
                x.grad.nan_to_num_(0.0)

    runs = []
    for patch in (contextlib.nullcontext, fastdpo.patched):
        model = double(tiny_model())
        model.model.embed_tokens.weight.data[WORDS.index("w3")] = float("nan")
        with patch():
            train(tmp_path / patch.__name__, model, double(tiny_model(seed=1)), callbacks=[Cleans()], **ACCUMULATED)
        runs.append([x.detach().nan_to_num(0.0) for x in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(*runs, strict=True))


def test_several_ranks_keep_two_batches(monkeypatch, tmp_path):
    """The last of at least two micro-batches cannot be run again."""
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    fastdpo.patch(DPO)
    for batches in (2, 3):
        options = {**ACCUMULATED, "gradient_accumulation_steps": batches}
        trainer = DPO_RECIPE.build(tmp_path, tiny_model(), tiny_model(seed=1), **options)
        assert (vars(trainer)[STATE].budget is None) == (batches == 2)


@pytest.mark.usefixtures("newer")
def test_changed_code_keeps_the_batches(monkeypatch, tmp_path, caplog):
    change(monkeypatch, "Trainer._run_epoch")
    set_newer(monkeypatch, "transformers")
    patched = compared(tmp_path, DPO, "own")
    assert re.match(r".*Trainer\._run_epoch.*, on which max_tokens relies.*\[changed-code\]", kept(caplog)[0])
    assert {path for _, path in patched.calls} == {"fused"}
    assert not [x for x in caplog.records if x.levelname == "WARNING" and "keeps" in x.message]


@pytest.fixture
def newer(monkeypatch):
    set_newer(monkeypatch, "transformers")


def test_how_many_micro_batches_result_is_said_once(tmp_path, caplog):
    with fastdpo.patched(DPO):
        train(tmp_path, tiny_model(), tiny_model(seed=1), **ACCUMULATED)
        assert re.search(r"; max_tokens=own \(8 steps in \d+ micro-batches\)$", outcomes.summary(DPO))
    (said,) = (x.message for x in caplog.records if "keeps them" in x.message)
    assert re.fullmatch(rf"fastdpo: {DPO}: 8 batches of a step run as about [2-7]; max_tokens=None keeps them", said)


class Plant:
    """Runs out of memory in a micro-batch of the first step that is cut: in the forward, or after a whole backward.

    Attributes:
        raised: how often it has.
        cut: the micro-batches of each step that was cut.
    """

    def __init__(self, monkeypatch, where: str, micro_batch: int):
        self.left, self.raised, self.cut = -1, 0, []
        backward, count, train = torch.Tensor.backward, counters.count_tokens, StepBudget.train

        def after_backward(*args, **kwargs):
            backward(*args, **kwargs)
            if where == "backward":
                self.count()

        def counting(*args):
            count(*args)
            if where == "forward" and torch.is_grad_enabled():
                self.count()

        def train_step(budget, batches, joined, micro_batches, *args):
            self.cut.append(len(micro_batches))
            self.left = micro_batch if len(micro_batches) > 1 and not self.raised else -1
            return train(budget, batches, joined, micro_batches, *args)

        monkeypatch.setattr(torch.Tensor, "backward", after_backward)
        monkeypatch.setattr(counters, "count_tokens", counting)
        monkeypatch.setattr(StepBudget, "train", train_step)

    def count(self):
        self.left -= 1
        if self.left == -1:
            self.raised += 1
            raise torch.OutOfMemoryError


RUNNING_OUT = {
    "DPO": (DPO, {}),
    "DPO, AdamW": (DPO, dict(optim="adamw_torch", learning_rate=1e-3)),
    "KTO": (KTO, {}),
    "Reward": (REWARD, {}),
}


@pytest.mark.parametrize("micro_batch", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("case", RUNNING_OUT)
def test_a_step_that_runs_out_of_memory_is_run_again(tmp_path, monkeypatch, caplog, case, where, micro_batch):
    """In the batches of TRL, as all later ones are."""
    trainer, options = RUNNING_OUT[case]
    stock = trained(tmp_path / "stock", trainer, **options)
    plant = Plant(monkeypatch, where, micro_batch)
    with fastdpo.patched(trainer):
        patched = trained(tmp_path / "patched", trainer, **options)
    assert_cut_alike(trainer, stock, patched)
    assert plant.raised == 1
    assert plant.cut[-1] > 1, "no later step is cut"
    assert caplog.text.count(f"memory ran out in a step of {plant.cut[-1]} micro-batches") == 1


def test_what_runs_out_of_memory_in_the_batches_of_trl_is_an_error(tmp_path, monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(counters, "count_tokens", fail)
    fastdpo.patch(DPO)
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, DPO)


def test_no_micro_batch_has_more_tokens_than_the_largest_padded_batch_so_far(tmp_path, monkeypatch):
    packed = []

    def padded_tokens(found, budget, batch):
        packed.append(int(batch["attention_mask"].sum()))
        assert found == batch["input_ids"].numel()
        return found

    def of_call(result, *args):
        return args[-1], max(padded or [10**9])

    padded = recorded_calls(monkeypatch, Budget, "padded_tokens", padded_tokens)
    of_calls = recorded_calls(monkeypatch, counters, "count_tokens", of_call)
    with fastdpo.patched(DPO):
        train(tmp_path, tiny_model(), tiny_model(seed=1), **ACCUMULATED)
    assert all(tokens <= largest for tokens, largest in of_calls)
    assert max(tokens for tokens, _ in of_calls) > max(packed)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sizes", [(2, 8), (1, 16)])
def test_bytes_that_are_kept_for_the_backward(tmp_path, monkeypatch, sizes, checkpointing):
    """The largest micro-batch keeps no more than that of stock: with checkpointing, without what the head keeps."""
    of_step = dict(zip(("per_device_train_batch_size", "gradient_accumulation_steps"), sizes, strict=True))
    options = {**ACCUMULATED, **of_step, "gradient_checkpointing": checkpointing}
    kept, largest, backward = {}, [], torch.Tensor.backward

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def ends(*args, **kwargs):
        largest.append(sum(kept.values()))
        kept.clear()
        backward(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", ends)
    most = {}
    for patch in (contextlib.nullcontext, fastdpo.patched):
        kept.clear(), largest.clear()
        with patch(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            train(tmp_path / patch.__name__, tiny_model(), tiny_model(seed=1), **options)
        most[patch] = max(largest[len(largest) // 2 :])
    assert most[fastdpo.patched] <= most[contextlib.nullcontext] * (1 if not checkpointing else 1.5)


@pytest.mark.parametrize("taken", [0, 4000])
def test_memory_of_others_is_read_in_each_step(tmp_path, monkeypatch, taken):
    device, others, tokens = DeviceMemory(monkeypatch, TOTAL), [0], {}
    report = lambda _: MemoryReport(1000, device.peak, others[0], TOTAL)  # noqa: E731
    monkeypatch.setattr(memory, "report", report)

    class Grows(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            others[0] = taken if state.global_step == 5 else others[0]
            device.computed.clear()

        def on_step_end(self, args, state, control, **kwargs):
            tokens[state.global_step] = max(device.computed)

    with fastdpo.patched(DPO):
        train(tmp_path, tiny_model(), tiny_model(seed=1), callbacks=[Grows()], **ACCUMULATED)
    later = max(tokens[step] for step in (6, 7, 8))
    assert tokens[5] > 1.2 * max(tokens[1], tokens[2])
    assert (later > 1.2 * max(tokens[1], tokens[2])) == (taken == 0)


@pytest.mark.parametrize(("options", "expected"), [({}, 300), (dict(use_vllm=True, vllm_mode="colocate"), 100)])
def test_next_to_an_engine_nothing_grows(monkeypatch, options, expected):
    monkeypatch.setattr(memory, "report", lambda device: MemoryReport(0, 100, 0, 10**6))
    for is_own in (True, False):
        stand = Stand(2, {})
        vars(stand.args).update(options)
        learned = LearnedTokens(stand, "a trainer", is_own=is_own)
        assert learned.of_step(100, 300) == (100 if is_own else expected)
        learn(learned, 100)
        assert min(learned.of_step(100, 300), 300) == expected


def test_a_peak_of_something_else_and_a_device_without_peaks_leave_the_batches_of_trl(monkeypatch):
    for report in (MemoryReport(0, 10**6, 0, 10**6), None):
        monkeypatch.setattr(memory, "report", lambda device, report=report: report)
        learned = LearnedTokens(Stand(2, {}), "a trainer", is_own=True)
        for _ in range(2):
            assert learned.of_step(100, 300) == 100
            learn(learned, 100)


def test_resuming(tmp_path):
    fastdpo.patch(DPO)
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_length=None)
    assert_resumes(tmp_path, [*long_pairs() * 2, *long_pairs()[:4]], **options)


WAYS = {
    "stock": contextlib.nullcontext,
    "None": functools.partial(fastdpo.patched, DPO, max_tokens=None),
    "own": functools.partial(fastdpo.patched, DPO),
}


@pytest.mark.parametrize(("first", "second"), [(a, b) for a in WAYS for b in WAYS if (a == "own") != (b == "own")])
def test_checkpoints_are_those_of_any_way(tmp_path, first, second):
    """A training that is stopped and resumed in another way ends in the weights of stock."""
    options = {**ACCUMULATED, "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    weights = []
    for ways in (("stock", "stock"), (first, second)):
        directory = tmp_path / str(len(weights))
        for way, steps in zip(ways, (3, 6), strict=True):
            with WAYS[way]():
                models = [double(tiny_model(seed=seed)) for seed in range(2)]
                trainer = DPO_RECIPE.build(directory, *models, **{**options, "max_steps": steps})
                trainer.train(resume_from_checkpoint=steps == 6)
        weights.append([x.detach() for x in models[0].parameters()])
    assert counters.outcomes[DPO, "steps"] == 3
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in zip(*weights, strict=True))
