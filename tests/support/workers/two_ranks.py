"""One rank of the trainings of a harness under DDP."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from tests.contract.harness import harnesses
from tests.support.comparison import double


def train_rank(directory: Path, trainer: str) -> None:
    """Writes the records of trainings in float64, patched last, to a file in the directory."""
    rank = os.environ["RANK"]
    harness = next(x for x in harnesses() if x.name == trainer)
    options = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2, prepare=double)
    runs = harness.both(directory / f"of rank {rank}", **options | harness.ranks[0])
    torch.save([replace(run, in_float64=None) for run in runs], directory / f"rank{rank}.pt")
