"""Memory that ops allocate and free while they run, which fake tensors do not show."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.devices import accumulation_dtype
from ...ops.head.logit_rows import BLOCK_BYTES, kernel_tile_rows, tile_rows
from .ledger import Scratch

BLOCKS = 1  # of `BLOCK_BYTES`, while several passes are made over a tile


class HeadScratch(NamedTuple):
    """Scratch memory of the fused head (see `ops.linear_logps`) on a device.

    Attributes:
        device: "cpu" or "cuda".
        device_memory: bytes of the GPU, or None if they are not known or the device is a CPU.
    """

    device: str
    device_memory: int | None

    @property
    def of_ops(self) -> dict[str, Scratch]:
        """By the names of the ops, functions of their arguments."""
        return {"fastdpo::linear_logps_fwd": self._forward, "fastdpo::linear_logps_bwd": self._backward}

    def _forward(self, args: tuple) -> int:
        hidden, weight, compute_dtype, keep = args[0], args[1], args[7], args[9]
        tile = 0 if keep == len(hidden) else self._tile(len(hidden), weight, compute_dtype)
        return tile + self._blocks + _cast_weight(weight, compute_dtype)

    def _backward(self, args: tuple) -> int:
        kept, hidden, weight, compute_dtype = args[2], args[7], args[8], args[14]
        wide, needs_weight = accumulation_dtype(compute_dtype), args[5][1]
        total = 0
        if not needs_weight and args[1] is None:
            return total  # the gradient was formed in the forward
        if len(kept) < len(hidden):
            total += self._tile(len(hidden), weight, compute_dtype) + self._blocks
        if self.device == "cpu" and compute_dtype != wide:  # products of tiles are computed in the wide dtype
            total += self._tile(len(hidden), weight, wide)
        if needs_weight and weight.dtype != wide:
            total += weight.numel() * wide.itemsize
        return total + _cast_weight(weight, compute_dtype)

    def _tile(self, n: int, weight: Tensor, dtype: torch.dtype) -> int:
        vocabulary = len(weight)
        if self.device == "cpu":
            rows = tile_rows(vocabulary, accumulation_dtype(dtype))
        else:
            rows = kernel_tile_rows(vocabulary, dtype, self.device_memory)
        return min(n, rows) * vocabulary * dtype.itemsize

    @property
    def _blocks(self) -> int:
        return BLOCKS * BLOCK_BYTES if self.device == "cpu" else 0


def _cast_weight(weight: Tensor, compute_dtype: torch.dtype) -> int:
    return 0 if weight.dtype == compute_dtype else weight.numel() * compute_dtype.itemsize
