"""`patch(max_tokens="auto")`: numbers of tokens that follow from the memory that a device reports."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastdpo
from fastdpo.integrations.trl.max_tokens import learned_tokens
from fastdpo.integrations.trl.max_tokens.learned_tokens import LearnedTokens
from fastdpo.models import calls as counters
from fastdpo.models.running import pace
from fastdpo.ops import memory
from fastdpo.ops.memory import MemoryReport
from tests.support.stand_ins.device_memory import DeviceMemory
from tests.support.trl.dpo import ACROSS_12, Run, assert_same, long_pairs, tiny_model, train
from tests.support.trl.resuming import assert_resumes
from tests.support.trl.reward import reward_model, train_reward
from tests.support.workers import budgets

DPO = "trl.DPOTrainer"
ACCUMULATED = dict(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    max_steps=8,
    data=long_pairs(ACROSS_12 * 2),
    max_length=None,
)
"""TRL's own micro-batches have up to 180 tokens of about 800."""
TOTAL = 6000
"""Bytes of memory in which micro-batches of 380 tokens fit, at 10 bytes a token."""
LAWS = {"proportional": lambda tokens: 10 * tokens, "quadratic": lambda tokens: tokens * tokens // 22}


def trained(trainer: str, directory: Path, **options) -> Run:
    steps = {**ACCUMULATED, **options}
    if trainer == DPO:
        return train(directory, tiny_model(), tiny_model(seed=1), **steps)
    if trainer == "trl.RewardTrainer":
        return train_reward(directory, reward_model(), **steps)
    return budgets.trained(directory, trainer, max_steps=5)


def last_number(caplog: pytest.LogCaptureFixture) -> int:
    """The number that the only line of a training names."""
    (text,) = (x.message for x in caplog.records if "repeats it" in x.message)
    return int(re.search(r"max_tokens=(\d+) repeats it$", text)[1])


@pytest.mark.parametrize("law", LAWS)
def test_micro_batches_grow_into_the_memory_and_not_beyond(tmp_path, monkeypatch, caplog, law):
    """Those of the last steps are the ones of the number that was learned."""
    caplog.set_level("INFO", "fastdpo")
    sizes = dict(per_device_train_batch_size=1, gradient_accumulation_steps=16)
    stock = trained(DPO, tmp_path / "stock", **sizes)
    device = DeviceMemory(monkeypatch, TOTAL, LAWS[law])
    with fastdpo.patched(DPO, max_tokens="auto"):
        learned = trained(DPO, tmp_path / "learned", **sizes)
    assert_same(stock, learned)
    assert 0.45 * TOTAL < device.peak <= 0.8 * TOTAL
    number, calls = last_number(caplog), device.computed.copy()
    assert 1.5 * max(calls[:8]) < max(calls) <= number
    device.computed.clear()
    with fastdpo.patched(DPO, max_tokens=number):
        trained(DPO, tmp_path / "repeated", max_steps=1, **sizes)
    assert calls[-len(device.computed) :] == device.computed


def test_the_end_of_a_training_has_a_line_for_each_spender(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "fastdpo")
    monkeypatch.setattr(memory, "held", {})
    monkeypatch.setenv(memory.VARIABLE, "1")
    DeviceMemory(monkeypatch, 10**9)
    with fastdpo.patched(DPO):
        trained(DPO, tmp_path, gradient_checkpointing=True, max_steps=4)
    said = [x.removeprefix("fastdpo: cpu, ") for x in caplog.messages if x.startswith("fastdpo: cpu, ")]
    texts = r"of up to \d+ tokens", r"[12] of 2 layers in batches of up to \d+ tokens"
    spenders = [x for x in memory.SPENDERS if x not in ("gradient tiles", "recordings")]  # spent on a GPU
    for line, spender, text in zip(said, spenders, texts, strict=True):
        assert re.fullmatch(rf"{spender}: [\d,]+ MiB, {text}", line)


@pytest.mark.parametrize("trainer", ["trl.RewardTrainer", "trl.SFTTrainer", "trl.KTOTrainer", "trl.GRPOTrainer"])
def test_other_trainers_have_fewer_micro_batches_from_the_third_step_on(tmp_path, monkeypatch, trainer):
    micro_batches = {}
    DeviceMemory(monkeypatch, 10**6)
    for max_tokens in (None, "auto"):
        counters.outcomes.clear()
        with fastdpo.patched(trainer, max_tokens=max_tokens):
            run = trained(trainer, tmp_path / str(max_tokens))
        assert {path for _, path in run.calls} == {"fused"}
        micro_batches[max_tokens] = run.calls["policy", "fused"]
    steps = counters.outcomes[trainer, "steps"]
    assert counters.outcomes[trainer, "micro-batches"] < 0.75 * steps * 4, "most steps have one"
    assert micro_batches["auto"] < micro_batches[None]


@pytest.mark.parametrize("foreign", [0, 10**9])
def test_without_room_micro_batches_remain_those_of_trl(tmp_path, monkeypatch, caplog, foreign):
    """Nothing fits but what TRL runs, or another peak was too high to learn from."""
    caplog.set_level("INFO", "fastdpo")
    device = DeviceMemory(monkeypatch, TOTAL if foreign else 1500, foreign=foreign)
    with fastdpo.patched(DPO, max_tokens="auto"):
        trained(DPO, tmp_path, max_steps=4)
    own = max(device.computed[: len(device.computed) * 3 // 4])
    assert max(device.computed) == own <= last_number(caplog) <= 1.06 * own


def test_resuming(tmp_path, monkeypatch):
    """The resumed training has the micro-batches of one that was not stopped, of a number learned before it stopped."""
    DeviceMemory(monkeypatch, 10**6, useful=200)
    fastdpo.patch(DPO, max_tokens="auto")
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_length=None)
    assert_resumes(tmp_path, [*long_pairs() * 2, *long_pairs()[:4]], **options)


class Stand:
    """A trainer in a step, on a device of its own."""

    def __init__(self, step: int, saved: dict, skipped: bool = False):
        self.state = SimpleNamespace(global_step=step, stateful_callbacks=saved)
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"), num_processes=1, optimizer_step_was_skipped=skipped, is_main_process=False
        )
        self.args, self.model = SimpleNamespace(), tiny_model()


def learn(learned: LearnedTokens, tokens: int) -> None:
    """Ends a step whose only micro-batch had so many tokens."""
    learned.ran((tokens, 1))
    learned.begin_largest()
    learned.learn()


def test_another_device_learns_anew(monkeypatch):
    saved: dict = {}
    for total, own in ((TOTAL, 20), (TOTAL // 2, 20), (TOTAL, 10)):
        monkeypatch.setattr(memory, "report", lambda device, total=total: MemoryReport(0, 100, 0, total))
        learned = LearnedTokens(Stand(1, saved), "a trainer")
        assert (learned.of_step(own) == own) == (own == 20)
        learn(learned, own)
    assert len(saved) == 2


def test_what_was_learned_follows_the_memory_that_others_take(monkeypatch):
    """Until it is final, later batches may be larger, for which recordings wait."""
    peak, others, growing = 0, 0, []
    monkeypatch.setattr(memory, "report", lambda device: MemoryReport(0, peak, others, 1000))
    monkeypatch.setattr(pace, "trainings", [pace.Training()])
    learned = LearnedTokens(Stand(2, {}), "a trainer")
    for tokens, peak in ((20, 100), (56, 700)):  # noqa: B007
        learned.ran((tokens, 1))
        growing.append(pace.training().is_growing)
        learned.begin_largest()
        learned.learn()
    learned.ran((56, 1))
    assert [*growing, pace.training().is_growing] == [True, True, False]
    assert learned.of_step(20) == 59
    others = 450  # half of what was taken is left
    assert learned.of_step(20) == 37


def test_a_skipped_step_of_the_optimizer_teaches_nothing(monkeypatch):
    """Its states may be missing. Nor does the first step."""
    DeviceMemory(monkeypatch, TOTAL)
    for step, skipped in ((0, False), (1, True)):
        saved: dict = {}
        learned = LearnedTokens(Stand(step, saved, skipped), "a trainer")
        learn(learned, 10)
        assert [*saved.values()] in ([], [learned_tokens.EMPTY])
