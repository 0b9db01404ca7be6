"""Reads from functions, such as hooks and replaced forwards, what they are and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def inner_function(function: Any) -> Any:
    """The function inside bound methods and partials."""
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    return function


def closure_contents(function: FunctionType) -> list[Any]:
    """The values that a function closes over. None for a variable that is not bound yet."""
    return [_contents(cell) for cell in function.__closure__ or ()]


def name_of(function: Callable) -> str:
    function = inner_function(function)
    return getattr(function, "__qualname__", type(function).__qualname__)


def module_of(function: Callable) -> str:
    """The module that a function was written in. `functools.wraps` changes
    `__module__`, but not `__globals__`.
    """
    function = inner_function(function)
    return getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""


def forwards_of(module: nn.Module) -> Iterator[Callable]:
    """What has replaced the forward of a module's class, from the outermost wrapper to the innermost."""
    forward = vars(module).get("forward")
    while forward is not None:
        yield forward
        forward = getattr(forward, "__wrapped__", None)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
