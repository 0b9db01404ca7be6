"""Memory that ops allocate and free while they run, which fake tensors do not show."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.devices import accumulation_dtype
from ...ops.head.logit_rows import BLOCK_BYTES, kernel_tile_rows, tile_rows
from .ledger import Scratch

BLOCKS = 1  # of `BLOCK_BYTES`, while several passes are made over a tile


def scratch_of_head(device: str, device_memory: int | None) -> dict[str, Scratch]:
    """Scratch memory of the fused head (see `ops.linear_logps`): by the names of the ops, functions of their arguments.

    Args:
        device: "cpu" or "cuda".
        device_memory: bytes of the GPU, or None if they are not known or the device is a CPU.
    """
    blocks = BLOCKS * BLOCK_BYTES if device == "cpu" else 0

    def tile(n: int, weight: Tensor, dtype: torch.dtype) -> int:
        vocabulary = len(weight)
        if device == "cpu":
            rows = tile_rows(vocabulary, accumulation_dtype(dtype))
        else:
            rows = kernel_tile_rows(vocabulary, dtype, device_memory)
        return min(n, rows) * vocabulary * dtype.itemsize

    def forward(args: tuple) -> int:
        hidden, weight, compute_dtype, keep = args[0], args[1], args[7], args[9]
        of_tile = 0 if keep == len(hidden) else tile(len(hidden), weight, compute_dtype)
        return of_tile + blocks + _cast_weight(weight, compute_dtype)

    def backward(args: tuple) -> int:
        kept, hidden, weight, compute_dtype = args[2], args[7], args[8], args[14]
        wide, needs_weight = accumulation_dtype(compute_dtype), args[5][1]
        if not needs_weight and args[1] is None:
            return 0  # the gradient was formed in the forward
        total = _cast_weight(weight, compute_dtype)
        if len(kept) < len(hidden):
            total += tile(len(hidden), weight, compute_dtype) + blocks
        if device == "cpu" and compute_dtype != wide:  # products of tiles are computed in the wide dtype
            total += tile(len(hidden), weight, wide)
        return total + (weight.numel() * wide.itemsize if needs_weight and weight.dtype != wide else 0)

    return {"fastdpo::linear_logps_fwd": forward, "fastdpo::linear_logps_bwd": backward}


def _cast_weight(weight: Tensor, compute_dtype: torch.dtype) -> int:
    return 0 if weight.dtype == compute_dtype else weight.numel() * compute_dtype.itemsize
