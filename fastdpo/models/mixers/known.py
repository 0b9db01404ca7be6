"""The functions that modeling files call by global names and that run on packed tokens.

transformers chooses what such a name stands for when the modeling file is imported: PyTorch code,
or a kernel of another package if that is installed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from .convolutions import Convolution
from .running import running
from .scans import SCANS, Scan

KNOWN: dict[str, Convolution | Scan] = {"causal_conv1d_fn": Convolution(), **SCANS}

WHOLE_MIXERS = {"mamba2_split_conv1d_scan_combined", "mamba_inner_fn"}
"""Names of kernels that compute a whole mixer. If one returns None, as it does without its package,
the modeling file calls single functions instead.
"""

WRAPPED = KNOWN.keys() | WHOLE_MIXERS

_ORIGINAL = "_fastdpo_original"


def wrapper(name: str, original: Callable) -> Callable:
    """The function that takes the place of a known one. It differs only in a mixer that runs on
    packed tokens.
    """

    @torch.compiler.disable(reason="it may run on packed tokens, whose layout is read on the host")
    def of_one_row(*args: Any, **kwargs: Any) -> Any:
        mixer = running()
        if mixer is None or not mixer.expected:
            return original(*args, **kwargs)
        if name in WHOLE_MIXERS:
            return None
        mixer.called.add(name)
        return KNOWN[name].run(original, mixer.segments, *args, **kwargs)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        values = args[0] if args else next(iter(kwargs.values()))
        if len(values) > 1:  # packed tokens are one row
            return original(*args, **kwargs)
        return of_one_row(*args, **kwargs)

    vars(replacement)[_ORIGINAL] = original
    return replacement


def original_of(function: Any) -> Any:
    """The function inside a `wrapper`."""
    return getattr(function, _ORIGINAL, function)


def is_torch(original: object) -> bool:
    """Whether what a known name stands for is PyTorch code, and not a kernel."""
    if not isinstance(original, FunctionType):
        return False
    return not inspect.getclosurevars(original).nonlocals.get("is_new_implementation", False)
