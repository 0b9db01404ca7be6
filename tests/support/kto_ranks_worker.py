"""One rank of a KTO training under DDP."""

import os
from pathlib import Path

import torch
from trl import KTOTrainer
from trl_kto_runs import train_kto
from trl_runs import tiny_model

import fastdpo


def train_rank(directory: Path, kind: str) -> None:
    """Trains "stock" or "patched", and writes logs, gradients and counters to a file in the directory."""
    rank = int(os.environ["RANK"])
    wrapped = []

    class Recorded(KTOTrainer):
        def training_step(self, *args, **kwargs):
            wrapped.append(type(self.model_wrapped).__name__)
            return super().training_step(*args, **kwargs)

    if kind == "patched":
        fastdpo.patch("trl.KTOTrainer")
    models = tiny_model(seed=0), tiny_model(seed=1)
    options = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2, trainer_class=Recorded)
    run = train_kto(directory / f"of rank {rank}", *models, evaluate=4, **options)
    result = {"logs": run.logs, "gradients": run.gradients, "calls": dict(fastdpo.calls), "wrapped": wrapped[0]}
    torch.save(result, directory / f"rank{rank}.pt")
