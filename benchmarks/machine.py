"""Where a measurement was taken: versions of the packages and the machine."""

import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def versions(*packages: str) -> dict[str, str]:
    """Python and each of the packages; a package that runs from its sources without being installed says so."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def processor() -> str:
    """The name of the CPU as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


def clock() -> dict[str, int]:
    """The clock of the GPU at this moment, where there is one and the package nvidia-ml-py tells."""
    with suppress(ModuleNotFoundError, RuntimeError):
        return {"clock_mhz": torch.cuda.clock_rate()} if torch.cuda.is_available() else {}
    return {}


def machine() -> dict[str, str | int]:
    described: dict[str, str | int] = {"cpu": processor(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        described["accelerator"] = torch.cuda.get_device_name()
    return described
