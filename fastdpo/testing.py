"""Judges the accuracy of ops: error against float64, relative to the error of plain PyTorch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType

import torch
from torch import Tensor

from .accuracy import error as error
from .accuracy import floor as floor
from .accuracy import op_bound


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
    if not x_error <= op_bound(eager_error, dtype):
        raise AssertionError(
            f"error {x_error:.3g}; expected at most 2 * {eager_error:.3g} (eager) + {floor(dtype):.3g} (floor)"
        )


@contextmanager
def float64_throughout() -> Iterator[None]:
    """In the block, code that casts to float32 by name casts to float64 instead, as modeling files of
    transformers do in norms and scans. Without it, a model in float64 is no more exact than these.
    """
    narrow, method = torch.float32, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    _replace_defaults(narrow, torch.float64)
    try:
        yield
    finally:
        torch.float32 = torch.float = narrow
        torch.Tensor.float = method
        _replace_defaults(torch.float64, narrow)


def _replace_defaults(old: torch.dtype, new: torch.dtype) -> None:
    """Replaces a dtype among the defaults of all functions in the modeling files that are imported.
    A default is read when a file is imported, which may be before the block or in it.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers.models.") or ".modeling_" not in name:
            continue
        owners = [module, *(x for x in vars(module).values() if isinstance(x, type) and x.__module__ == name)]
        for function in (inspect.unwrap(x) for owner in owners for x in vars(owner).values() if callable(x)):
            if isinstance(function, FunctionType) and function.__module__ == name and function.__defaults__:
                function.__defaults__ = tuple(new if x is old else x for x in function.__defaults__)
