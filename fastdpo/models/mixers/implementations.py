"""What the functions of modeling files call: PyTorch code, or the kernel of a package.

transformers chooses when a modeling file is imported. A function with the name of the PyTorch code
passes its arguments on to the kernel if the package is installed, without those that the kernel
does not take. Where the package `kernels` is installed, the function is a module instead, whose
forward may be replaced by a kernel of the Hugging Face Hub.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

_refused: set[Callable] = set()


def calls_kernel(function: Callable) -> bool:
    """Whether a function of a modeling file calls a kernel."""
    return bool(_chosen(function).get("is_new_implementation"))


def kernel_of(function: Callable) -> Callable | None:
    """The kernel that a function of a modeling file calls; None if it calls PyTorch code, or if the
    kernel is not known.
    """
    return _chosen(function).get("implementation") if calls_kernel(function) else None


def is_function_of(function: object, file: str) -> bool:
    """Whether a function is defined in a modeling file, given by the name of its module, and not
    imported from a package.
    """
    return isinstance(function, FunctionType) and function.__module__ == file


def takes(function: Callable, arguments: frozenset[str]) -> bool:
    """Whether a function has parameters of these names."""
    return arguments <= inspect.signature(function).parameters.keys()


def refuse(function: Callable) -> None:
    """Notes that a function gives wrong results on packed tokens."""
    _refused.add(function)


def is_refused(function: Callable) -> bool:
    return function in _refused


@functools.lru_cache(256)
def _chosen(function: Callable) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)
