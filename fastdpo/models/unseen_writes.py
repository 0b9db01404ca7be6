"""Writes to tensors that raise no version: those to their `data`, and to their memory, as through NumPy.

What was made from tensors is kept with copies of them, and compared with them before it is used again. On the CPU, it
is made anew if they differ. On a device, the host would have to wait for the comparison, so it is used, and an error is
raised before the next step of an optimizer, or in a later comparison if there is none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..ops.devices import is_capturing, is_host


class Comparison(NamedTuple):
    """A comparison on a device.

    Attributes:
        differs: its result, which is on its way to the host if the device is a GPU.
        arrived: when it is there; None on other devices, from which it is read.
    """

    differs: Tensor
    arrived: torch.cuda.Event | None


unread: list[Comparison] = []


def copies_of(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone() for x in tensors)


def are_as_copied(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> bool:
    """Whether tensors are equal to copies that were made of them. On a device, they are taken to be, and are compared
    there without a synchronization.

    Raises:
        RuntimeError: those of an earlier comparison on a device were not.
    """
    raise_if_written(waits=False)
    if any((x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device) for x, y in zip(tensors, copies, strict=True)):
        return False
    device = tensors[0].device
    if is_host(device):
        return all(map(torch.equal, tensors, copies))
    if not is_capturing(device):
        _compare_later(tensors, copies, device)
    return True


def raise_if_written(*, waits: bool) -> None:
    """Reads the results of comparisons on a device, of those that are there or, if it `waits`, of all.

    Raises:
        RuntimeError: tensors were not equal to their copies.
    """
    while unread and (waits or unread[0].arrived is None or unread[0].arrived.query()):
        differs, arrived = unread.pop(0)
        if arrived is not None:
            arrived.synchronize()
        if differs:
            unread.clear()
            raise RuntimeError(
                "fastdpo: a batch must not be written to by `data` between its calls or after it was collated, which "
                "raises no version; got other values than those that were packed. Write to its tensors themselves, or "
                "replace them"
            )


def _compare_later(tensors: Sequence[Tensor], copies: Sequence[Tensor], device: torch.device) -> None:
    # NaN is equal to nothing, and is no change.
    differs = torch.stack([((x != y) & (x == x)).any() for x, y in zip(tensors, copies, strict=True)]).any()
    arrived = None
    if device.type == "cuda":
        differs = torch.empty_like(differs, device="cpu", pin_memory=True).copy_(differs, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(device))
    unread.append(Comparison(differs, arrived))
    _watch_optimizers()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(lambda *_: raise_if_written(waits=True))
