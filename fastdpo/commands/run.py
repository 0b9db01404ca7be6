"""`fastdpo run`: runs a training program unchanged, with its trainers patched.

The program replaces this process, so its arguments, exit code, signals and tracebacks are its own. Each
Python process that it starts patches a trainer when it imports it (`startup/sitecustomize.py`). They learn
the options from one environment variable, which nothing else sets.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..checks import require_flags, shown
from ..integrations.options import PatchOptions
from ..integrations.registry import ENTRIES, targeted_trainers
from ..logs import STRICT
from .startup.sitecustomize import VARIABLE


def run(
    command: Sequence[str],
    targets: Sequence[str] = (),
    options: PatchOptions = PatchOptions(),  # noqa: B008
    *,
    strict: bool = False,
) -> NoReturn:
    """Replaces this process by a training program whose trainers are patched.

    Args:
        command: a script (`train.py ...`), a module (`-m package.module ...`) or a console command
            (`trl dpo ...`), followed by its arguments.
        targets: names of trainers or packages to patch, as in `fastdpo.patch`.
        options: of `fastdpo.patch`.
        strict: set `FASTDPO_STRICT=1` for the program, so that everything that is not fused is an
            error.

    Raises:
        TypeError, ValueError: the command is empty or cannot be found, a target is unknown, or an
            option is malformed.
    """
    is_sequence = isinstance(command, Sequence) and not isinstance(command, str)
    if not is_sequence or not all(isinstance(word, str) for word in command):
        raise TypeError(f"run: command must be a sequence of strings; got {shown(command)}")
    require_flags("run", strict=strict)
    options = options.checked("run")
    trainers = targeted_trainers("run", targets)
    program = _program(command)
    handle, notes = tempfile.mkstemp(prefix="fastdpo-run-")
    os.close(handle)
    settings = {
        "pid": os.getpid(),
        "notes": notes,
        "trainers": {entry.trainer_module: entry.trainer for entry in ENTRIES if entry.trainer in trainers},
        "options": options.given(),
    }
    startup = str(Path(__file__).parent / "startup")
    paths = [startup, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {VARIABLE: json.dumps(settings), "PYTHONPATH": os.pathsep.join(paths)}
    if strict:
        os.environ[STRICT] = "1"
    sys.stdout.flush()
    if sys.platform == "win32":  # exec would return to the shell at once
        sys.exit(subprocess.run(program).returncode)
    os.execv(program[0], program)


def _program(command: Sequence[str]) -> list[str]:
    """The command as arguments of `execv`."""
    if not command:
        raise ValueError("run: command must not be empty; got []")
    name, *arguments = command
    is_script = name.endswith(".py") and Path(name).exists()
    if name == "-m" or is_script or (Path(name) / "__main__.py").is_file():
        return [sys.executable, name, *arguments]
    # Console commands of this environment win, whether or not it is activated.
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        reason = ", which does not exist" if name.endswith(".py") else ""
        rule = "be a script, -m and a module, or a command on PATH"
        raise ValueError(f"run: command must {rule}; got {shown(name)}{reason}")
    return [found, *arguments]
