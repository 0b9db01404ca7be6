"""Notes on the kernels of a device and on compiled layers, kept in a file for later processes.

They hold for one device name and architecture, driver, torch, Triton, flash attention (packages and
builds from the Kernels Hub), and source of kernels and ops. The environment variable
FASTDPO_KERNEL_CACHE names the directory of the file (`~/.cache/fastdpo` by default); "0" disables it.

Other processes may read and replace the file at any time. One that cannot be read is replaced. Its name is a hash of
all that the notes depend on, so one of another format, which other sources write, has another name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ... import atomic_files
from ...logs import warn
from ..devices import architecture

VARIABLE = "FASTDPO_KERNEL_CACHE"
LIBRARIES = ("flash-attn", "flash-attn-3", "flash-attn-4")

builds: dict[str, ModuleType] = {}
"""By backend, the module of a build of flash attention from the Kernels Hub, as transformers has loaded it."""


class Compiled(NamedTuple):
    """The compiled layers of a model.

    Attributes:
        seconds: that compiling them takes.
        saving: the part of a step's time that they save.
    """

    seconds: float
    saving: float


class Notes(NamedTuple):
    """What is known of a device.

    Attributes:
        passed: the kernels that passed their trial (`verdicts`).
        choices: by call, the fastest way to compute it, and what was measured (`tuning`).
        layers: by model, its compiled layers (`models.running`).
    """

    passed: set[str]
    choices: dict[str, Any]
    layers: dict[str, Compiled]


def read(device: torch.device) -> Notes:
    """The notes on a device. Empty if there is no file for it."""
    path = _path(device)
    if path is not None:
        try:
            content = json.loads(path.read_text())
            layers = {str(name): Compiled(*map(float, x)) for name, x in content["layers"].items()}
            return Notes({str(name) for name in content["passed"]}, dict(content["choices"]), layers)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
    return Notes(set(), {}, {})


def note(device: torch.device, **new: Any) -> None:
    """Adds to the notes on a device, by the names of their fields."""
    path = _path(device)
    if path is None:
        return
    known = read(device)
    known = known._replace(**{name: getattr(known, name) | x for name, x in new.items()})
    content = {"environment": environment(device), **known._asdict()}  # the environment is for readers
    try:
        atomic_files.write(path, json.dumps(content, indent=1, default=sorted).encode())
    except OSError as error:
        warn_unwritable(f"{VARIABLE}: {path} cannot be written, so each process tries the kernels again: {error}")


def environment(device: torch.device) -> dict[str, str]:
    """Everything that the notes depend on."""
    described = (f"{backend} as {module.__name__}" for backend, module in sorted(builds.items()))
    return {**_of_process(device), "hub": ", ".join(described)}  # names that differ between versions


@lru_cache
def _of_process(device: torch.device) -> dict[str, str]:
    """What does not change as long as the process runs."""
    import triton

    driver_version = getattr(torch._C, "_cuda_getDriverVersion", None)  # builds for CPUs have none
    package = Path(__file__).parents[2]
    sources = [path for folder in ("kernels", "ops") for path in sorted((package / folder).rglob("*.py"))]
    return {
        "device": device_name(device),
        "architecture": architecture(device),
        "driver": str(driver_version()) if driver_version is not None else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "libraries": ", ".join(filter(None, map(_installed, LIBRARIES))),
        "fastdpo": hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest(),
    }


def digest(device: torch.device) -> str:
    """A short name for the environment of a device."""
    content = json.dumps(environment(device), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _installed(package: str) -> str:
    """The package and its version, or "" if it is not installed."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _path(device: torch.device) -> Path | None:
    """The file of a device, or None if notes are disabled."""
    given = os.environ.get(VARIABLE) or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/fastdpo"
    directory = os.path.expanduser(given)
    if given == "0" or directory.startswith("~"):  # the user of a container may have no home directory
        return None
    return Path(directory) / f"kernels-{digest(device)}.json"


@lru_cache
def warn_unwritable(message: str) -> None:
    warn(message)
