"""Runs Python programs in forks of a process that has imported TRL, which takes seconds in each new process.

For programs of which a test examines what they do, and not how an interpreter starts with them. A program
that replaces its process by another interpreter continues in the fork, and imports TRL again: what it
imports depends on what it has done.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
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
        process = PROCESSES.Process(target=become, args=arguments)
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, SECONDS)
        return subprocess.CompletedProcess(words, process.exitcode, *(path.read_text() for path in paths))


def become(words: list[str], cwd: Path, env: dict[str, str], paths: Sequence[Path]) -> None:
    """Entry point of the fork, whose stdout and stderr are written to two paths, or both to one."""
    for stream, path in zip((sys.stdout, sys.stderr), paths, strict=True):
        stream.flush()
        with path.open("a") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    gc.freeze()  # trainings collect garbage, which takes long among all that is imported
    os.execv = _start_again
    atexit._clear()
    try:
        _run(words)
    except Exception as error:
        sys.last_value = error  # as an interpreter does before it ends
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # a fork does not


def _start_again(program: str, command: list[str]) -> None:
    """Stands in for `os.execv` of Python, or of a command that is a script of Python."""
    for name in [x for x in sys.modules if x.partition(".")[0] in ("trl", "sitecustomize")]:
        del sys.modules[name]
    _run(command[1:] if program == sys.executable else command, startup=["sitecustomize"])


def _run(words: list[str], startup: Sequence[str] = ()) -> None:
    """Runs a program as an interpreter does, after importing the modules `startup`."""
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    folder = Path.cwd() if is_module else Path(words[0]).resolve().parent
    sys.path[:1] = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for name in startup:
        importlib.import_module(name)
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
