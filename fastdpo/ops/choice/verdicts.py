"""Whether fastdpo's kernels work on a GPU: each is tried on a small case before its first use there.

A kernel that returns wrong numbers, writes outside of its results, does not compile, does not fit
the device or cannot be launched is disabled for the process, with one warning, and PyTorch computes
in its place. With `FASTDPO_STRICT=1`, it raises `NotFused` instead. So is a kernel of the head that passed its trial
and fails in a call.

Kernels that passed are noted in a file (`notes`), so that later processes do not try them
again. Failures are not noted: their cause may be gone in the next process.

Nothing is tried on a CPU, nor while a CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache, partial
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

from ...accuracy import error, kernel_bound
from ...logs import logger, report, strict
from ..devices import architecture, in_new_thread, is_capturing
from . import notes

TRIED_DEVICES = ("cuda",)


Comparison = tuple[str, Tensor, Tensor]
"""The name of a kernel's result, the result on the device, and what it must be on the CPU: NaN where that is NaN."""


class Kernel(NamedTuple):
    """A kernel as it is compiled for some inputs.

    Attributes:
        name: of the op that the kernel computes.
        device: where it runs.
        dtype: of its inputs.
        features: what else it is compiled for, such as sizes.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    features: tuple[Hashable, ...] = ()

    @property
    def noted(self) -> str:
        """The kernel in the notes on its device."""
        return " ".join(map(str, (self.name, self.dtype, *self.features)))


Trial = Callable[[torch.device, torch.dtype], Iterable[Comparison]]
"""Runs a kernel on a small case."""

failures: dict[Kernel, str | None] = {}
reported: set[Kernel] = set()
_lock = RLock()


def works(kernel: Kernel, trial: Trial) -> bool:
    """Whether a kernel may be used. Tries it if that is not known yet.

    Raises:
        NotFused: it may not, and `FASTDPO_STRICT=1`.
    """
    with _lock:
        if kernel not in failures and is_capturing(kernel.device):
            return True
        reason = failure_of_candidate(kernel, trial)
        if reason is not None:
            _report(kernel, reason)
        return reason is None


def failure_of_candidate(kernel: Kernel, trial: Trial) -> str | None:
    """Why a kernel may not be used, or None. Reports nothing: another kernel is used in its place."""
    if not is_tried(kernel.device):
        return None
    with _lock:
        if kernel not in failures:
            failures[kernel] = _tried(kernel, trial)
        return failures[kernel]


def disable(kernel: Kernel, reason: str) -> None:
    """Disables a kernel that has failed in a call, for the rest of the process, with one warning.

    Raises:
        NotFused: with `FASTDPO_STRICT=1`.
    """
    with _lock:
        failures[kernel] = reason
        _report(kernel, reason)


def is_tried(device: torch.device) -> bool:
    """Whether kernels are tried on a device."""
    return device.type in TRIED_DEVICES and (device.type != "cuda" or torch.cuda.is_available())


def outcome(trial: Trial, device: torch.device, dtype: torch.dtype) -> str | None:
    """Runs a trial, wherever the kernel is first used, and says what is wrong with it, if anything."""
    announce(device)
    return in_new_thread(partial(_outcome, trial, device, dtype), device)


def _outcome(trial: Trial, device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            for name, found, exact in trial(device, dtype):
                off, allowed = error(found, exact, equal_nan=True), kernel_bound(found.dtype)
                if not off <= allowed:
                    return f"wrong values on a small case: {name} is off by {off:.3g}; at most {allowed:.3g} expected"
    except Exception as reason:  # it may not compile, fit the device, or launch
        return f"{type(reason).__name__}: {reason}"
    return None


def _report(kernel: Kernel, reason: str) -> None:
    """Warns that a kernel is disabled, once. In strict mode, raises that at every call."""
    if kernel in reported and not strict():
        return
    reported.add(kernel)
    name, device, dtype, features = kernel
    described = ", ".join(map(str, (_described(device), dtype, *features)))
    report(f"the kernel {name} is disabled on {described}, and PyTorch computes in its place: {reason}")


def _tried(kernel: Kernel, trial: Trial) -> str | None:
    if kernel.noted in notes.read(kernel.device).passed:
        return None
    reason = outcome(trial, kernel.device, kernel.dtype)
    if reason is None:
        notes.note(kernel.device, passed={kernel.noted})
    return reason


@lru_cache
def announce(device: torch.device) -> None:
    """Says what the first batch waits for, before the first kernel of a device is compiled."""
    logger.info("fastdpo: compiling and trying kernels on %s; the first batch waits for them", _described(device))


def _described(device: torch.device) -> str:
    return f"{notes.device_name(device)} ({architecture(device)})"
