"""Packages that are not in the environment of the tests, in folders that `make test` installs and names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


def packages(variable: str) -> Path:
    """The folder that an environment variable names. Without it, the test is skipped."""
    if variable not in os.environ:
        pytest.skip(f"{variable} must be the folder of the packages; `make test` installs and names it")
    return Path(os.environ[variable])


def run_with(variable: str, worker: str, *arguments: object, before: tuple[Path, ...] = ()) -> None:
    """Runs a module in a process that has the packages of a variable, after those of the folders `before`."""
    path = [*map(str, (*before, packages(variable), ROOT))]
    done = subprocess.run(
        [sys.executable, "-m", worker, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
