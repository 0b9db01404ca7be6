"""Small collectives between the ranks of `torch.distributed`. Without a process group there is one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

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


def raising_on_all(function: Callable[[], T], *errors: type[Exception]) -> T:
    """What a function returns. If it raises one of these errors on any rank, it is raised on all, so that none waits
    for that rank. Every rank must call this.
    """
    result, own = cast(T, None), None
    try:
        result = function()
    except errors as caught:
        own = caught
    of_all = gather_objects(own)
    error = own or next(filter(None, of_all), None)
    if error is not None:
        raise error
    return result


def largest_of_ranks(x: Tensor, device: torch.device) -> Tensor:
    """The largest value of any rank at each place of a tensor on the CPU. By a collective on this device, since ranks
    may have separate disks. Every rank must call this.
    """
    if rank_and_world_size()[1] == 1:
        return x
    x = x.to(device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x.cpu()
