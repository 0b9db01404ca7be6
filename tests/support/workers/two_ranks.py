"""One rank of the trainings of a harness under DDP."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.contract.harness import harnesses
from tests.support.comparison import double
from tests.support.kernels import recorder


def train_rank(directory: Path, trainer: str, by_clock: bool) -> None:
    """Writes the records of trainings in float64, patched last, to a file in the directory.

    Args:
        directory: for the files of the ranks.
        trainer: its name.
        by_clock: whether graphs and compiled layers are turned on by a planted clock.
    """
    rank = os.environ["RANK"]
    if by_clock:
        recorder.install(pytest.MonkeyPatch())
        recorder.compile_layers(pytest.MonkeyPatch())
    harness = next(x for x in harnesses() if x.name == trainer)
    options = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2, prepare=double)
    steps = dict(max_steps=6, learning_rate=1e-3) if by_clock else {}
    runs = harness.both(directory / f"of rank {rank}", **options | harness.ranks[0] | steps)
    torch.save([replace(run, in_float64=None) for run in runs], directory / f"rank{rank}.pt")
