"""Judges the accuracy of ops: error against float64, relative to the error of plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastdpo.accuracy import error, floor


def assert_as_accurate_as(x: Tensor, eager: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> None:
    """Asserts `error(x) <= 2 * error(eager) + floor(dtype)`.

    Args:
        x: a result or gradient of an op.
        eager: the same from plain PyTorch in the same dtype (`fastdpo.ops.definitions`).
        exact: the same from plain PyTorch in float64, from the same inputs.
        dtype: the dtype to which x was rounded, or None for that of x.

    Raises:
        AssertionError: the error of x exceeds this bound, or its shape differs from that of exact.
    """
    if x.shape != exact.shape:
        raise AssertionError(f"shape {list(x.shape)}; expected {list(exact.shape)}")
    dtype = x.dtype if dtype is None else dtype
    x_error, eager_error = error(x, exact), error(eager, exact)
    if not x_error <= 2 * eager_error + floor(dtype):
        raise AssertionError(
            f"error {x_error:.3g}; expected at most 2 * {eager_error:.3g} (eager) + {floor(dtype):.3g} (floor)"
        )
