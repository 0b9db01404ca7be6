"""Trainings of SFT, KTO, DPO, Reward and TPO in float64 whose steps accumulate batches, in one process or on one of
several ranks.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path

import torch

import fastdpo
from tests.support.comparison import double
from tests.support.trl import kto, reward, sft
from tests.support.trl.dpo import Run, assert_same, pairs, tiny_model, train
from tests.support.trl.online import writer

STEPS = dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, learning_rate=0.05, max_steps=3)
"""Steps of 16 rows or pairs on a rank. In one process, the third one has 6."""
UNITS = 38
SFT, KTO, DPO, REWARD, TPO = TRAINERS = tuple(f"trl.{x}Trainer" for x in ("SFT", "KTO", "DPO", "Reward", "TPO"))
MAX_TOKENS = {SFT: 90, KTO: 90, DPO: 160, REWARD: 160, TPO: 200}
GROUPS = GRPO, RLOO = ("trl.GRPOTrainer", "trl.RLOOTrainer")
MAX_TOKENS |= dict.fromkeys(GROUPS, 45)
COMMON = {
    "as it is": {},
    "one micro-batch": dict(max_tokens=10_000),
    "rows above the budget": dict(max_tokens=12),
    "without accumulation": dict(per_device_train_batch_size=16, gradient_accumulation_steps=1),
    "logged later, checkpointing": dict(logging_steps=2, gradient_checkpointing=True),
    "evaluation, pad_to_multiple_of": dict(evaluate=6, eval_strategy="steps", eval_steps=1, pad_to_multiple_of=16),
}
"""Arguments of `compared` that suit each of the trainers."""


def shuffled(rows: Callable[..., list[dict]], n: int = UNITS, seed: int = 0) -> list[dict]:
    """Rows of which those of a prompt are in several batches."""
    drawn = rows(n, seed)
    random.Random(seed).shuffle(drawn)
    return drawn


def related_pairs(n: int, seed: int = 0) -> list[dict]:
    """Pairs with margins. Each has the prompt of another one."""
    drawn = pairs(n, seed)
    return [{**row, "prompt": drawn[i // 2]["prompt"], "margin": 0.1 * i} for i, row in enumerate(drawn)]


def related_triples(n: int, seed: int = 0) -> list[dict]:
    """`related_pairs`, each with the answer of another one as its reference."""
    drawn = related_pairs(n, seed)
    return [{**row, "reference": drawn[i - 1]["chosen"]} for i, row in enumerate(drawn)]


def trained(directory: Path, trainer: str, tiny: dict | None = None, prepare: Callable = double, **options) -> Run:
    """Trains with the patches that are active. `options` are arguments of a `Recipe.train`."""
    if trainer in GROUPS:
        from tests.support.workers import group_budgets  # not at the top: TRL 0.29 has not all that it imports

        return group_budgets.trained(directory, trainer, **options)
    options = {**STEPS, **options}
    if trainer == REWARD:
        model = prepare(reward.reward_model(**(tiny or {})))
        data = dict(data=shuffled(related_pairs), center_rewards_coefficient=0.3)
        return reward.train_reward(directory, model, **{**data, **options})
    models = [prepare(tiny_model(seed=seed, **(tiny or {}))) for seed in range(2)]
    if trainer == TPO:
        from tests.support.trl import tpo  # not at the top: TRL 0.29 has no such trainer

        return tpo.train_tpo(directory, models[0], **{"data": shuffled(related_triples), "tpo_alpha": 0.7, **options})
    if trainer == SFT:
        options = {"data": lambda n, seed=0: shuffled(sft.rows, UNITS if n == 16 else n, seed), **options}
        return sft.train_sft(directory, models[0], **options)
    reference = models[1] if options.pop("reference", True) else None
    if trainer == KTO:
        return kto.train_kto(directory, models[0], reference, **{"data": shuffled(kto.rows), **options})
    return train(directory, models[0], reference, **{"data": shuffled(related_pairs), **options})


def compared(
    directory: Path, trainer: str, max_tokens: int | str | None = None, stock: Run | None = None, **options
) -> Run:
    """Compares a training with `max_tokens` with that of stock, which is run unless it is given, and returns it."""
    stock = stock or trained(directory / "stock", trainer, **options)
    with fastdpo.patched(trainer, max_tokens=max_tokens or MAX_TOKENS[trainer]):
        patched = trained(directory / f"patched {max_tokens}", trainer, **options)
    assert_cut_alike(trainer, stock, patched)
    return patched


def assert_cut_alike(trainer: str, stock: Run, patched: Run) -> None:
    if trainer in GROUPS:
        from tests.support.workers import group_budgets

        return group_budgets.assert_same(stock, patched)
    return assert_same(stock, patched)


def with_and_without(directory: Path, trainer: str, max_tokens: int | str, **options) -> list[Run]:
    """Patched trainings without `max_tokens` and with it."""
    runs = []
    for number in (None, max_tokens):
        with fastdpo.patched(trainer, max_tokens=number):
            runs.append(trained(directory / str(number), trainer, **options))
    return runs


def train_rank(directory: Path, trainer: str) -> None:
    """Writes a stock and a patched training to a file in the directory."""
    rank = int(os.environ["RANK"])
    options: dict = dict(evaluate=6, max_steps=2)
    if trainer in GROUPS:  # saved before the processes form a group, in which only one of them saves
        options = dict(reference=directory / f"reference {rank}")
        double(writer(1)).save_pretrained(options["reference"])
    stock = trained(directory / f"stock {rank}", trainer, **options)
    with fastdpo.patched(trainer, max_tokens=MAX_TOKENS[trainer] // 2):
        patched = trained(directory / f"patched {rank}", trainer, **options)
    torch.save([vars(stock), vars(patched)], directory / f"rank{rank}.pt")
