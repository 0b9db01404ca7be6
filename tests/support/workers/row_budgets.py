"""Trainings of SFT and KTO in float64 whose steps accumulate batches, in one process or on one of several ranks."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import torch

import fastdpo
from tests.support.comparison import double
from tests.support.trl import kto, sft
from tests.support.trl.dpo import Run, tiny_model

STEPS = dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, learning_rate=0.05, max_steps=3)
"""Steps of 16 rows on a rank. In one process, the third one has 6."""
ROWS = 38
MAX_TOKENS = 90
TRAINERS = ("trl.SFTTrainer", "trl.KTOTrainer")


def shuffled(rows: Callable[..., list[dict]], n: int = ROWS, seed: int = 0) -> list[dict]:
    """Rows of which those of a prompt are in several batches."""
    drawn = rows(n, seed)
    random.Random(seed).shuffle(drawn)
    return drawn


def trained(directory: Path, trainer: str, tiny: dict | None = None, prepare: Callable = double, **options) -> Run:
    """Trains with the patches that are active. `options` are arguments of `train_sft` or `train_kto`."""
    options = {**STEPS, **options}
    models = [prepare(tiny_model(seed=seed, **(tiny or {}))) for seed in range(2)]
    if trainer == "trl.SFTTrainer":
        options = {"data": lambda n, seed=0: shuffled(sft.rows, ROWS if n == 16 else n, seed), **options}
        return sft.train_sft(directory, models[0], **options)
    reference = models[1] if options.pop("reference", True) else None
    return kto.train_kto(directory, models[0], reference, **{"data": shuffled(kto.rows), **options})


def with_and_without(directory: Path, trainer: str) -> list[Run]:
    """Patched trainings without `max_tokens` and with it."""
    runs = []
    for max_tokens in (None, MAX_TOKENS):
        with fastdpo.patched(trainer, max_tokens=max_tokens):
            runs.append(trained(directory / str(max_tokens), trainer, evaluate=4))
    return runs


def train_rank(directory: Path, trainer: str) -> None:
    """Writes a stock and a patched training to a file in the directory."""
    rank = int(os.environ["RANK"])
    options: dict = dict(evaluate=6, max_steps=2)
    stock = trained(directory / f"stock {rank}", trainer, **options)
    with fastdpo.patched(trainer, max_tokens=MAX_TOKENS // 2):
        patched = trained(directory / f"patched {rank}", trainer, **options)
    torch.save([vars(stock), vars(patched)], directory / f"rank{rank}.pt")
