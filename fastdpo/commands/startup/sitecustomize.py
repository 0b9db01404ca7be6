"""Patches trainers when a program imports them. Run by each Python process that `fastdpo run` starts.

Imports nothing but the standard library until a trainer is imported. A `sitecustomize` further along
`sys.path`, which this one hides, runs as well.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "FASTDPO_RUN"

IMPORTED, PATCHED, CALLED = "imported", "patched", "called"
"""What processes note of a trainer: of its module, its class and its models."""


def _patch(trainer: str) -> None:
    from fastdpo.integrations import patching
    from fastdpo.logs import strict

    run = json.loads(os.environ[VARIABLE])
    _note(IMPORTED, trainer)
    try:
        _print(patching.patch(trainer, **run["options"]))
    except patching.PatchError as error:
        if strict() or patching.options_of(trainer) is not None:  # the program has called `patch` with others
            raise
        _print(str(error).removeprefix("patch: "))
    else:
        _note(PATCHED, trainer)
        atexit.register(_report_calls, trainer)


def _report_calls(trainer: str) -> None:
    from fastdpo.integrations import outcomes

    summary = outcomes.summary(trainer)
    if summary is not None:
        _note(CALLED, trainer)
        _print(summary)


def _note(what: str, trainer: str) -> None:
    """Notes something of a trainer for the first process of the program, which reports what none has noted."""
    notes = Path(json.loads(os.environ[VARIABLE])["notes"])
    if notes.exists():  # until that process ends
        with notes.open("a") as file:
            file.write(f"{what} {trainer}\n")


def _report_nothing(run: dict[str, Any]) -> None:
    """Says at the end of a program that it has imported no trainer, or has called no model although options were
    given. Says nothing of a program that crashed, and of a module that was not found.
    """
    notes = Path(run["notes"])
    noted = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
    notes.unlink(missing_ok=True)
    crashed = hasattr(sys, "last_value")  # set by an exception that nobody has caught
    if crashed or sys.argv[0] == "-m":  # Python replaces it when it has found the module
        return
    if not noted:
        supported = ", ".join(sorted(set(run["trainers"].values())))
        _print(f"fastdpo: off, the program has imported none of {supported} [nothing-imported]")
    patched = [*dict.fromkeys(trainer for what, trainer in noted if what == PATCHED)]
    if patched and run["options"] and all(what != CALLED for what, _ in noted):
        from fastdpo.integrations import outcomes

        _print(outcomes.summary_without_calls(patched, run["options"]))


def _print(line: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def _watcher(trainers: dict[str, str]) -> Any:
    """The watcher of imports. Its file is loaded by its path: fastdpo may not be installed for this Python."""
    path = Path(__file__).parents[2] / "integrations" / "imports.py"
    spec = importlib.util.spec_from_file_location("fastdpo_imports", path)
    module = importlib.util.module_from_spec(spec)  # pyright: ignore[reportArgumentType]
    spec.loader.exec_module(module)  # pyright: ignore[reportOptionalMemberAccess]
    return module.ImportWatcher(trainers, _patch)


def _run_hidden_sitecustomize() -> None:
    here = Path(__file__).parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _start() -> None:
    run = json.loads(os.environ.get(VARIABLE, "null"))
    if run is not None:
        sys.meta_path.insert(0, _watcher(run["trainers"]))
        if run["pid"] == os.getpid():
            atexit.register(_report_nothing, run)


if __name__ == "sitecustomize":
    _start()
    _run_hidden_sitecustomize()
