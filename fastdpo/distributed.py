"""Small collectives between the ranks of `torch.distributed`. Without a process group there is one rank."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_objects(x: T) -> list[T]:
    """Returns the picklable object of each rank, in the order of ranks. Every rank must call this."""
    gathered = [x] * rank_and_world_size()[1]
    if len(gathered) > 1:
        dist.all_gather_object(gathered, x)
    return gathered
