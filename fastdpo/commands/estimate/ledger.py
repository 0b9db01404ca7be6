"""Counts the bytes of the tensors that are alive while a program runs on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

Scratch = Callable[[tuple[Any, ...]], int]
"""Bytes that an op allocates and frees while it runs, from its arguments."""


class MemoryLedger(TorchDispatchMode):
    """Adds up the storages of all tensors that ops return inside of it, each until it is freed.

    Under a `FakeTensorMode`, nothing is computed and nothing is allocated, and the sums are what an
    allocator without rounding or fragmentation would have given out.

    Args:
        scratch: memory of ops that no result shows, by the names of the ops.
        mask_count: the number of True in every boolean mask that a tensor is indexed by, which a
            fake mask cannot tell.
        held: tensors that exist already. A view of one is no memory.

    Attributes:
        live: bytes that are alive.
    """

    def __init__(self, scratch: dict[str, Scratch], mask_count: int, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self._scratch, self._mask_count = scratch, mask_count
        self._known = WeakIdKeyDictionary()
        self._peaks: dict[str, list[int]] = {}  # the bytes at the start of each, and the most since
        for tensor in held:
            self._known[tensor.untyped_storage()] = 0

    def start_peak(self, name: str) -> None:
        """Starts to record a peak, above what is alive now."""
        self._peaks[name] = [self.live, self.live]

    def stop_peak(self, name: str) -> int:
        """Ends a record, and returns the largest number of bytes above those at its start."""
        start, largest = self._peaks.pop(name)
        return largest - start

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.index.Tensor and (mask := _mask_of(args[1])) is not None:
            result = args[0].new_empty(self._mask_count, *args[0].shape[mask.dim() :])
        elif func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Fake tensors know this op in bfloat16 only, though a CPU runs it in every dtype.
            result = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {})).to(args[0].dtype)
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        scratch = self._scratch.get(func.name())
        if scratch is not None:
            self._record(self.live + scratch(args))
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            size = storage.nbytes()
            self._known[storage] = size
            self.live += size
            self._record(self.live)
            weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size

    def _record(self, size: int) -> None:
        for peak in self._peaks.values():
            peak[1] = max(peak[1], size)


def _mask_of(indices: list[Tensor | None]) -> Tensor | None:
    first = indices[0]
    return first if first is not None and first.dtype == torch.bool else None
