"""One rank of a stock or patched training under DDP, for all trainers of `trainings`."""

import os
from pathlib import Path

import torch

import fastdpo
from tests.support.comparison import double
from tests.support.trl import kto
from tests.support.workers.budgets import shuffled
from tests.support.workers.trainings import TRAIN, model_of


def train_rank(directory: Path, kind: str, trainer: str) -> None:
    """Trains "stock" or "patched", and writes the record to a file in the directory."""
    rank = int(os.environ["RANK"])
    if kind == "patched":
        fastdpo.patch(trainer)
    models = [model_of(trainer, seed) for seed in range(2)]
    options: dict = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2)
    if trainer == "trl.KTOTrainer":  # in float64, with batches of which one rank has only desirable rows
        models, options["data"] = [double(model) for model in models], shuffled(kto.rows, 16)
    run = TRAIN[trainer](directory / f"of rank {rank}", *models, evaluate=4, **options)
    torch.save(vars(run), directory / f"rank{rank}.pt")
