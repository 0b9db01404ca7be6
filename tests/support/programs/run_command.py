"""Runs `fastdpo run` in a process of its own, which a new interpreter or a fork begins."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import ROOT
from tests.support.programs.warm import run_program


def run(
    *command: object, program: tuple = (sys.executable, "-m"), path: tuple = (), warm: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The result of `fastdpo run` with these arguments.

    Args:
        command: the arguments.
        program: what starts the module fastdpo.
        path: directories from which the program imports, before those of the tests.
        warm: run it in a fork of a process that has imported what TRL imports, instead of by `program`.
        variables: of the environment.
    """
    variables = {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), **variables}
    if warm:
        return run_program("-m", "fastdpo", "run", *command, env=variables)
    return subprocess.run(
        [*map(str, program), "fastdpo", "run", *map(str, command)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
