"""The functions that modeling files call by global names and that run on packed tokens.

Such a function calls PyTorch code, or the kernel of a package if that is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import implementations
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


def runs_packed(name: str, original: Any, file: str) -> bool:
    """Whether packed tokens may reach what a known name stands for.

    PyTorch code takes them, and so does the kernel that transformers calls instead, if it has the
    arguments for states. Kernels of the Hugging Face Hub and functions of other code do not.

    Args:
        name: one of `KNOWN`.
        original: what it stands for.
        file: the name of the modeling file's module.
    """
    if not implementations.is_function_of(original, file) or implementations.is_refused(original):
        return False
    if not implementations.calls_kernel(original):
        return True
    kernel = implementations.kernel_of(original)
    return kernel is not None and implementations.takes(kernel, KNOWN[name].kernel_arguments)
