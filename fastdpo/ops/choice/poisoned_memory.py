"""Memory in which trials place the inputs and results of kernels, full of NaN around them.

A kernel that reads outside of its inputs returns NaN, and one that writes outside of its results leaves other
values there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .verdicts import Comparison

MARGIN = 16  # least number of columns of NaN behind each row, which end where vectors can be loaded


def random_values(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Result(NamedTuple):
    """Memory for a result [n, w] of a kernel, and the NaN around it."""

    inside: Tensor
    memory: Tensor

    @staticmethod
    def like(x: Tensor, device: torch.device, dtype: torch.dtype) -> Result:
        memory = torch.full((len(x) + 2, _columns(x.shape[1])), torch.nan, dtype=dtype, device=device)
        return Result(memory[1:-1, : x.shape[1]], memory)

    def margin(self, name: str) -> Comparison:
        """That the memory around the result is still NaN."""
        self.inside.fill_(torch.nan)
        return f"memory around {name}", self.memory, torch.full(self.memory.shape, torch.nan)


def _columns(width: int) -> int:
    return -(-width // MARGIN) * MARGIN + MARGIN


def placed(x: Tensor, device: torch.device, dtype: torch.dtype, aligned: bool = True) -> Tensor:
    """A copy of x [n, ..., w] on the device, between rows and columns of NaN.

    Kernels are compiled separately for rows that start where vectors can be loaded.
    """
    n, *others, width = x.shape
    memory = torch.full((n + 2, *others, _columns(width) + (not aligned)), torch.nan, dtype=dtype, device=device)
    memory[1:-1, ..., :width] = x.to(device, dtype)
    return memory[1:-1, ..., :width]
