"""Whether fastdpo's kernels work on a GPU: each is tried on a small case before its first use there.

A kernel that returns wrong numbers, writes outside of its results, does not compile, does not fit
the device or cannot be launched is disabled for the process, with one warning, and PyTorch computes
in its place. With `FASTDPO_STRICT=1`, it raises `NotFused` instead.

Kernels that passed are noted in a file, so that later processes do not try them again. The note holds
for one device name and architecture, driver, torch, Triton, and source of kernels and ops. The
environment variable FASTDPO_KERNEL_CACHE names the directory of the file (`~/.cache/fastdpo` by
default); "0" disables it. Failures are not noted: their cause may be gone in the next process.

Nothing is tried on a CPU, nor while a CUDA graph is captured.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor

from .. import atomic_files
from ..logs import NotFused, report, strict, warn
from .head_table import architecture
from .layout_cache import is_capturing

TRIED_DEVICES = ("cuda",)
VARIABLE = "FASTDPO_KERNEL_CACHE"
FORMAT = 1  # of the file
ROUNDINGS = 8  # of the result's dtype that a result may be off by, relative to its norm
LEAST_ROUNDING = 2.0**-16  # float32 results are sums of many products, which devices add in different orders


class Comparison(NamedTuple):
    """A result of a kernel, and what it must be.

    Attributes:
        name: of the result.
        found: on the device.
        exact: on the CPU. Where it is NaN, the result must be NaN, too.
    """

    name: str
    found: Tensor
    exact: Tensor


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
        """The kernel in the file of its device."""
        return " ".join(map(str, (self.name, self.dtype, *self.features)))


Trial = Callable[[torch.device, torch.dtype], Iterable[Comparison]]
"""Runs a kernel on a small case."""

_failures: dict[Kernel, str | None] = {}
_lock = RLock()


def works(kernel: Kernel, trial: Trial) -> bool:
    """Whether a kernel may be used. Tries it if that is not known yet.

    Raises:
        NotFused: it may not, and `FASTDPO_STRICT=1`.
    """
    return failure(kernel, trial) is None


def failure(kernel: Kernel, trial: Trial) -> str | None:
    """Why a kernel may not be used, or None. See `works`."""
    if not _is_tried(kernel.device):
        return None
    with _lock:
        if kernel not in _failures:
            if is_capturing(kernel.device):
                return None
            _failures[kernel] = _tried(kernel, trial)
            if _failures[kernel] is not None:
                report(_message(kernel))
        if _failures[kernel] is not None and strict():
            raise NotFused(_message(kernel))
        return _failures[kernel]


def _is_tried(device: torch.device) -> bool:
    return device.type in TRIED_DEVICES and (device.type != "cuda" or torch.cuda.is_available())


def outcome(trial: Trial, device: torch.device, dtype: torch.dtype) -> str | None:
    """Runs a trial and says what is wrong with it, if anything.

    It runs in a thread of its own, where autograd, autocast, modes and the default device are those
    of a new process, wherever the kernel is first used.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_outcome, trial, device, dtype).result()


def _outcome(trial: Trial, device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            for name, found, exact in trial(device, dtype):
                error, allowed = _error(found, exact), ROUNDINGS * max(torch.finfo(found.dtype).eps, LEAST_ROUNDING)
                if not error <= allowed:
                    return f"wrong values on a small case: {name} is off by {error:.3g}; at most {allowed:.3g} expected"
    except Exception as reason:  # it may not compile, fit the device, or launch
        return f"{type(reason).__name__}: {reason}"
    return None


def _error(found: Tensor, exact: Tensor) -> float:
    """Relative error of the norm. Equal elements, NaN among them, have no error."""
    found, exact = found.detach().cpu().double(), exact.detach().double()
    equal = (found == exact) | (found.isnan() & exact.isnan())
    scale = exact.nan_to_num(posinf=0, neginf=0).norm()
    return float(torch.where(equal, 0.0, found - exact).norm() / (scale if scale > 0 else 1))


def _message(kernel: Kernel) -> str:
    name, device, dtype, features = kernel
    described = f"{_device_name(device)} ({architecture(device)}), {dtype}{''.join(f', {x}' for x in features)}"
    return f"the kernel {name} is disabled on {described}, and PyTorch computes in its place: {_failures[kernel]}"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _tried(kernel: Kernel, trial: Trial) -> str | None:
    directory = _directory()
    if directory is None:
        return outcome(trial, kernel.device, kernel.dtype)
    environment = _environment(kernel.device)
    content = json.dumps(environment, sort_keys=True)
    path = directory / f"kernels-{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"
    if kernel.noted in _passed(path, environment):
        return None
    found = outcome(trial, kernel.device, kernel.dtype)
    if found is None:
        _note(path, environment, kernel)
    return found


def _directory() -> Path | None:
    given = os.environ.get(VARIABLE)
    if given == "0":
        return None
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastdpo"


@lru_cache
def _environment(device: torch.device) -> dict[str, str]:
    """Everything but the kernel itself that its verdict depends on."""
    import triton

    driver_version = getattr(torch._C, "_cuda_getDriverVersion", None)  # builds for CPUs have none
    package = Path(__file__).parents[1]
    sources = [path for folder in ("kernels", "ops") for path in sorted((package / folder).glob("*.py"))]
    return {
        "device": _device_name(device),
        "architecture": architecture(device),
        "driver": str(driver_version()) if driver_version is not None else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fastdpo": hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest(),
    }


def _passed(path: Path, environment: dict[str, str]) -> list[str]:
    """The kernels in a file. None if it cannot be read, or is not of this environment and format."""
    try:
        content = json.loads(path.read_text())
        if content["format"] == FORMAT and content["environment"] == environment:
            return [str(name) for name in content["passed"]]
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return []


def _note(path: Path, environment: dict[str, str], kernel: Kernel) -> None:
    """Adds a kernel to a file, which other processes may read and replace at any time."""
    passed = sorted({*_passed(path, environment), kernel.noted})
    content = {"format": FORMAT, "environment": environment, "passed": passed}
    try:
        atomic_files.write(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        _warn_unwritable(f"{VARIABLE}: {path} cannot be written, so each process tries the kernels again: {error}")


@lru_cache
def _warn_unwritable(message: str) -> None:
    warn(message)
