"""`patch(max_tokens=...)`: TRL's RewardTrainer with the same pairs in each step, cut by a budget of tokens."""

from pathlib import Path

import pytest
from trl import RewardTrainer

import fastdpo
from tests.support.comparison import double
from tests.support.trl.dpo import Run, assert_same, long_pairs
from tests.support.trl.reward import adapter, reward_model, train_reward

MAX_TOKENS = 130  # three or more micro-batches of 8 pairs, of different numbers of pairs
RAGGED = [{**row, "margin": 0.1 * i} for i, row in enumerate(long_pairs() * 2)]
STEP = dict(per_device_train_batch_size=8, max_steps=4, data=RAGGED, center_rewards_coefficient=0.3)

# option: what stock trains with, what the budget changes
OPTIONS = {
    "full": (STEP, {}),
    "accumulation": (STEP, dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)),
    "last_step_is_partial": (
        STEP | dict(per_device_train_batch_size=12),
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=3),  # 4, 4, 4, then 4 pairs
    ),
    "adapter": (STEP | adapter(), {}),
    "evaluation": (STEP | dict(evaluate=6, eval_strategy="steps", eval_steps=1, max_steps=2), {}),
    "logged_later": (STEP | dict(logging_steps=3), {}),
    "worker_processes": (STEP | dict(dataloader_num_workers=1, max_steps=2), {}),
}


def budgeted(directory: Path, max_tokens: int = MAX_TOKENS, **options) -> Run:
    with fastdpo.patched("trl.RewardTrainer", max_tokens=max_tokens):
        return train_reward(directory, reward_model(), **options)


@pytest.mark.parametrize("option", OPTIONS)
def test_same_training(tmp_path, option):
    expected, changes = OPTIONS[option]
    stock = train_reward(tmp_path / "stock", reward_model(), **expected)
    stock.in_float64 = lambda: train_reward(tmp_path / "float64", double(reward_model()), **expected)
    cut = budgeted(tmp_path / "cut", **expected | changes)
    assert_same(stock, cut)
    assert {path for _, path in cut.calls} == {"fused"}
    assert cut.calls["policy", "fused"] > 2 * cut.steps


def test_a_budget_without_room_for_a_pair_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^patch: max_tokens must be at least the distinct tokens of every pair; got"):
        budgeted(tmp_path, 20, **STEP)


class SumOverPairs(RewardTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs) * len(inputs["input_ids"]) / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(trainer_class=SumOverPairs), "SumOverPairs, which overrides the loss or the steps of RewardTrainer"),
        (dict(accelerator_config={"dispatch_batches": True}), "dispatch_batches=True"),
        (dict(auto_find_batch_size=True), "auto_find_batch_size=True"),
    ],
    ids=["own_loss", "dispatch_batches", "auto_find_batch_size"],
)
def test_what_changes_the_loss_or_the_pairs_of_a_step_is_refused(tmp_path, changes, message):
    with pytest.raises(NotImplementedError, match=f"^patch: max_tokens does not support {message}"):
        budgeted(tmp_path, **STEP, **changes)
