"""How the ops are judged: their error against float64, relative to the error that plain PyTorch makes."""

from __future__ import annotations

import torch
from torch import Tensor


def error(x: Tensor, exact: Tensor) -> float:
    """`||x - exact|| / ||exact||` in float64. Elements that are equal, infinities too, count as no error."""
    x, exact = x.detach().double(), exact.detach().double()
    difference = torch.where(x == exact, 0.0, x - exact).norm()
    scale = torch.where(exact.isfinite(), exact, 0.0).norm()
    return float(difference / scale if scale > 0 else difference)


def floor(dtype: torch.dtype) -> float:
    """The error that no op of this dtype is blamed for: one rounding, and a few of the float32 sums behind it."""
    if dtype == torch.float64:
        return 1e-12
    return max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)


def assert_as_accurate_as(x: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> None:
    """Asserts `error(x) <= 2 * error(eager) + floor(dtype)`.

    Args:
        x: what an op returned, or a gradient that it gave.
        eager: the same from plain PyTorch at the same dtype (`fastdpo.ops.reference`).
        exact: the same from plain PyTorch in float64, of the same inputs.
        dtype: what x was rounded to; that of x if None.

    Raises:
        AssertionError: the error of x is over the budget, or its shape is not that of exact.
    """
    if x.shape != exact.shape:
        raise AssertionError(f"shape {list(x.shape)}; expected {list(exact.shape)}")
    of_x, of_eager, allowed = error(x, exact), error(eager, exact), floor(x.dtype if dtype is None else dtype)
    if not of_x <= 2 * of_eager + allowed:
        raise AssertionError(f"error {of_x:.3g}; expected at most 2 * {of_eager:.3g} (eager) + {allowed:.3g} (floor)")
