"""Reads from functions, such as hooks and replaced forwards, what they are and where they come from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import harmless

_MODELING = ("transformers.models.", "transformers_modules.")
"""Packages of modeling files."""

_MASKING = "transformers.masking_utils"

_forward_of = attrgetter("forward")


class Code:
    """The functions that modules of some classes run, as pointers that are compared in a few loops in C.

    Args:
        kinds: the classes.

    Attributes:
        functions: the forwards of the classes, what is called by name in their modeling files and where transformers
            makes masks, and torch's `scaled_dot_product_attention`. Those that fastdpo has wrapped are as they were.
        hash: of these.
    """

    def __init__(self, kinds: Collection[type]) -> None:
        self._kinds = [*kinds]
        written_in = {kind.__module__ for each in kinds for kind in each.__mro__}
        files = sorted(name for name in written_in if name.startswith(_MODELING))
        self._globals = [vars(sys.modules[name]) for name in (*files, _MASKING) if name in sys.modules]
        self._were = *self._of_classes(), *map(dict, self._globals)
        named = [x for file in self._globals for x in file.values() if callable(x)]
        self.functions = [*self._of_classes()[0], functional.scaled_dot_product_attention, *map(_own_of, named)]
        self.hash = hash(tuple(map(id, self.functions)))

    def __reduce__(self) -> tuple:
        """A copy of a model finds them anew: globals cannot be copied."""
        return Code, (self._kinds,)

    def is_unchanged(self) -> bool:
        return (*self._of_classes(), *self._globals) == self._were

    def _of_classes(self) -> tuple[list[Callable], Callable]:
        return [*map(_forward_of, self._kinds)], functional.scaled_dot_product_attention


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


def is_named_hook(hook: Callable) -> bool:
    """Whether a hook is one of those that are known by their names or modules (see `harmless.HOOKS`)."""
    return name_of(hook).split(".")[-1] in harmless.HOOKS or module_of(hook) in harmless.HOOK_MODULES


def forwards_of(module: nn.Module) -> Iterator[Callable]:
    """What has replaced the forward of a module's class, from the outermost wrapper to the innermost."""
    return wrapped_in(vars(module).get("forward"))


def _own_of(function: Any) -> Any:
    """A function, without the wrapper that fastdpo has put into a modeling file."""
    is_ours = isinstance(function, FunctionType) and module_of(function).startswith("fastdpo.")
    return vars(function).get("__wrapped__", function) if is_ours else function


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
