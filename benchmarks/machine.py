"""The machine and the package versions of a measurement."""

import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of the packages, or "not installed" (also if run from source)."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def processor() -> str:
    """Name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def on_gpu() -> bool:
    """Whether suites have the cases of a GPU: where there is one, or in a rehearsal, with GPU_CASES=1."""
    return torch.cuda.is_available() or os.environ.get("GPU_CASES") == "1"


def clock() -> dict[str, int]:
    """Current clock of the GPU in MHz; empty without a GPU or without the package nvidia-ml-py."""
    with suppress(ModuleNotFoundError, RuntimeError):
        return {"clock_mhz": torch.cuda.clock_rate()} if torch.cuda.is_available() else {}
    return {}


def bfloat16() -> str:
    """Whether products in bfloat16 are native or emulated."""
    native = torch.accelerator.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "native" if native else "emulated"


def machine() -> dict[str, str | int]:
    """CPU, number of threads and, if there is one, the accelerator."""
    facts: dict[str, str | int] = {"cpu": processor(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["accelerator"] = torch.cuda.get_device_name()
    return facts


def origin(*packages: str) -> dict[str, Any]:
    """When, at which commit, on which machine and with which packages something is measured."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": when, "commit": commit(), "machine": machine(), "versions": versions(*packages)}


def commit() -> str:
    """The current commit, followed by " with changes" if the working tree is not clean."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return (git("rev-parse", "HEAD") or "unknown") + (" with changes" if git("status", "--porcelain") else "")
