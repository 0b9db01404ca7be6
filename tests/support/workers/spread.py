"""One rank of trainings with `max_tokens` on pairs of several lengths, which counts the tokens that it computes."""

import math
import os
import random
from pathlib import Path

import torch
from transformers import TrainerCallback

import fastdpo
from fastdpo.models.calls import tokens
from tests.support.trl.dpo import long_pairs, tiny_model, train
from tests.support.trl.reward import reward_model, train_reward

PROFILES = {"HH": (24, 2.15), "TL;DR": (50, 11.14), "UltraFeedback": (40, 0.42), "Capybara": (56, 1.59)}
"""The median of the tokens of a row, for short rows in proportion to those of the dataset, and the ratio of prompt to
answer.
"""
CASES = [*(("trl.DPOTrainer", profile) for profile in PROFILES), ("trl.RewardTrainer", "TL;DR")]
STEPS = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=8)


def pairs_of(profile: str, n: int) -> list[dict[str, str]]:
    """Pairs whose lengths are lognormal, as in the benchmarks."""
    median, ratio = PROFILES[profile]
    answer, rng = median / (1 + ratio), random.Random(0)
    typical = median - answer, answer, answer
    return long_pairs(tuple(tuple(max(1, round(x * math.exp(rng.gauss(0, 0.6)))) for x in typical) for _ in range(n)))


class Counts(TrainerCallback):
    """Notes the tokens that were computed in each step."""

    def __init__(self, trainer: str):
        self._name, self._before = trainer, tokens[trainer, "computed"]
        self.of_steps: list[int] = []

    def on_step_end(self, *args, **kwargs):
        now = tokens[self._name, "computed"]
        self.of_steps.append(now - self._before)
        self._before = now


def train_rank(directory: Path) -> None:
    """Writes the tokens of each step, by trainer and profile, to a file in the directory."""
    rank, of_steps = int(os.environ["RANK"]), {}
    for trainer, profile in CASES:
        with fastdpo.patched(trainer, max_tokens=400):
            counts = Counts(trainer)
            options = dict(data=pairs_of(profile, 128), max_length=None, callbacks=[counts], **STEPS)
            at = directory / f"{trainer} {profile} {rank}"
            if trainer == "trl.DPOTrainer":
                train(at, tiny_model(), tiny_model(seed=1), **options)
            else:
                train_reward(at, reward_model(), **options)
        of_steps[trainer, profile] = counts.of_steps
    torch.save(of_steps, directory / f"rank{rank}.pt")
