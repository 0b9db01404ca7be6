"""Runs models of transformers in float64 from end to end, so that they are exact."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType

import torch


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
