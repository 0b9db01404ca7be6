"""Reads from functions, such as hooks and replaced forwards, what they are and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
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
    """The module that a function was written in, or the class of a callable object. `functools.wraps` changes
    `__module__` of both, but neither `__globals__` nor the class.
    """
    function = inner_function(function)
    written = getattr(function, "__globals__", {}).get("__name__")
    is_object = not isinstance(function, type | BuiltinFunctionType)
    return written or getattr(type(function) if is_object else function, "__module__", None) or ""


def forwards_of(module: nn.Module) -> Iterator[Callable]:
    """What has replaced the forward of a module's class, from the outermost wrapper to the innermost."""
    return wrapped_in(vars(module).get("forward"))


def wrapped_in(function: Callable | None) -> Iterator[Callable]:
    """A function, and those that it wraps, from the outermost to the innermost."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def autocast_of(forward: Callable) -> torch.autocast | None:
    """The innermost autocast in which the wrappers of a forward run it, such as that of `Accelerator.prepare`."""
    wrappers = (x for x in map(inner_function, wrapped_in(forward)) if isinstance(x, FunctionType))
    autocasts = [x for wrapper in wrappers for x in closure_contents(wrapper) if isinstance(x, torch.autocast)]
    return autocasts[-1] if autocasts else None


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
