"""The name and the module of a function inside bound methods and partials."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any


def inner_function(function: Any) -> Any:
    """The function inside bound methods and partials."""
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    return function


def name_of(function: Callable) -> str:
    function = inner_function(function)
    return getattr(function, "__qualname__", type(function).__qualname__)


def module_of(function: Callable) -> str:
    """The module that a function was written in. `functools.wraps` changes
    `__module__`, but not `__globals__`.
    """
    function = inner_function(function)
    return getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""
