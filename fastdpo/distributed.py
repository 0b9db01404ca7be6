"""Small collectives between the ranks of `torch.distributed`. Without a process group there is one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

STEPS_OF_NOTICE = 8
"""Steps from one look at the store to the next, in which ranks act on what was there. No rank is so far behind another.
"""


def rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_objects(x: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns the picklable object of each rank of a group, which by default has all ranks, in their order. Every rank
    of it must call this.
    """
    gathered = [x] * (rank_and_world_size()[1] if group is None else dist.get_world_size(group))
    if len(gathered) > 1:
        dist.all_gather_object(gathered, x, group=group)
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


class Ballot:
    """A number of each rank, of which all ranks learn the smallest in the same step. By the key-value store of the
    process group: there is no collective, and no rank waits for another. A rank that never has a number keeps the
    others without a result.

    Args:
        name: what is asked. Ranks ask for the same names in the same order.
    """

    _asked: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str) -> None:
        self._name, self._key = name, ""
        self._is_cast = self._is_told = False

    def smallest(self, step: int, number: float | None) -> float | None:
        """The smallest number of all ranks, from the same step on on all of them, unless they were not told in time.

        Args:
            step: that begins.
            number: of this rank, which stays what it was first; None if it has none yet.
        """
        store = store_of_ranks()
        if store is None:
            return number
        if step % STEPS_OF_NOTICE:
            return None
        if not self._key:  # copies of a ballot that never ask have none
            self._asked[self._name] += 1
            self._key = f"fastdpo/{self._name}/{self._asked[self._name]}"
        rank, ranks = rank_and_world_size()
        result, keys = f"{self._key}/result", [f"{self._key}/{i}" for i in range(ranks)]
        if number is not None and not self._is_cast:
            self._is_cast = True
            store.set(keys[rank], str(number))
        if rank == 0 and not self._is_told and store.check(keys):
            self._is_told = True
            smallest = min(float(store.get(key)) for key in keys)
            store.set(result, f"{smallest} {step + STEPS_OF_NOTICE}")
        if not store.check([result]):
            return None
        smallest, first = store.get(result).split()
        return float(smallest) if step >= int(first) else None


def store_of_ranks() -> Store | None:
    """The key-value store of the default process group. None if there is none, or one rank only."""
    if rank_and_world_size()[1] == 1:
        return None
    return dist.distributed_c10d._get_default_store()
