"""Runs Python programs in forks of a process that has imported TRL, which takes seconds in each new process.

For programs of which a test examines what they do, and not how an interpreter starts with them.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.support.workers.processes import PROCESSES

SECONDS = 300


def run_program(
    *command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a script, or "-m" and a module, followed by its arguments, with `env` added to the environment.

    Raises:
        subprocess.TimeoutExpired: the program has run for `SECONDS`. It is killed.
    """
    words = [*map(str, command)]
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / name for name in ("stdout", "stderr")]
        arguments = (words, cwd or Path.cwd(), {**os.environ, **(env or {})}, paths)
        process = PROCESSES.Process(target=_become, args=arguments)
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, SECONDS)
        return subprocess.CompletedProcess(words, process.exitcode, *(path.read_text() for path in paths))


def _become(words: list[str], cwd: Path, env: dict[str, str], paths: list[Path]) -> None:
    """Entry point of the fork."""
    for stream, path in zip((sys.stdout, sys.stderr), paths, strict=True):
        stream.flush()
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], str(cwd)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
