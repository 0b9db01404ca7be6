"""One rank of trainings on groups of completions: stock, patched, and stock in float64."""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fastdpo
from tests.support.comparison import double
from tests.support.trl.groups import AGAIN, NAMES, train_group
from tests.support.trl.online import writer


def train_rank(directory: Path) -> None:
    """Writes the records of both trainers, each of three trainings, to a file in the directory."""
    rank, runs = int(os.environ["RANK"]), []
    references = [directory / f"{dtype} reference of rank {rank}" for dtype in ("float32", "float64")]
    for reference, cast in zip(references, (nn.Module.float, double), strict=True):
        cast(writer(1)).save_pretrained(reference)  # before the processes form a group, in which only one of them saves
    for trainer_class, name in NAMES.items():
        of_trainer = []
        for patches, reference, cast in (
            (nullcontext(), references[0], nn.Module.float),
            (fastdpo.patched(name), references[0], nn.Module.float),
            (nullcontext(), references[1], double),
        ):
            with patches:
                options = {**AGAIN, "per_device_train_batch_size": 4, "beta": 0.1, "reference": reference}
                out = directory / f"{name}{len(of_trainer)} of rank {rank}"
                of_trainer.append(vars(train_group(out, cast(writer(0)), trainer_class, evaluate=4, **options)))
        runs.append(of_trainer)
    torch.save({"runs": runs, "world": dist.get_world_size()}, directory / f"rank{rank}.pt")
