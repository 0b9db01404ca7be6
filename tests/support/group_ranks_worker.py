"""One rank of stock and patched trainings on groups of completions."""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from trl_group_runs import AGAIN, NAMES, train_group
from trl_online_runs import writer

import fastdpo


def train_rank(directory: Path) -> None:
    """Writes the records of both trainers, stock and patched, to a file in the directory."""
    rank, runs = int(os.environ["RANK"]), []
    reference = directory / f"reference of rank {rank}"
    writer(1).save_pretrained(reference)  # before the processes form a group, in which only one of them saves
    for trainer_class, name in NAMES.items():
        pair = []
        for patches in (nullcontext(), fastdpo.patched(name)):
            with patches:
                options = {**AGAIN, "per_device_train_batch_size": 4, "beta": 0.1, "reference": reference}
                out = directory / f"{name}{len(pair)} of rank {rank}"
                pair.append(vars(train_group(out, writer(0), trainer_class, evaluate=4, **options)))
        runs.append(pair)
    torch.save({"runs": runs, "world": dist.get_world_size()}, directory / f"rank{rank}.pt")
