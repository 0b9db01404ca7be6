"""Runs `fastdpo run` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import ROOT


def run(
    *command: object, program: tuple = (sys.executable, "-m"), path: tuple = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """The result of `fastdpo run` with these arguments.

    Args:
        command: the arguments.
        program: what starts the module fastdpo.
        path: directories from which the program imports, before those of the tests.
        variables: of the environment.
    """
    return subprocess.run(
        [*map(str, program), "fastdpo", "run", *map(str, command)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
