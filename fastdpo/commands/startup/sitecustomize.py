"""Patches trainers when a program imports them. Run by each Python process that `fastdpo run` starts.

Imports nothing but the standard library until a trainer is imported. A `sitecustomize` further along
`sys.path`, which this one hides, runs as well.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "FASTDPO_RUN"

IMPORTED, PATCHED, CALLED = "imported", "patched", "called"
"""What processes note of a trainer: of its module, its class and its models."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of trainers by the finders that follow, each time: programs may only look for one, and an
    import that fails may succeed later.
    """

    def __init__(self, trainers: dict[str, str]):
        self._trainers = dict(trainers)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        trainer = self._trainers.pop(fullname, None)  # so that the others find it
        if trainer is None:
            return None
        spec = importlib.util.find_spec(fullname)
        self._trainers[fullname] = trainer
        if spec is not None and spec.loader is not None:
            _patch_after(spec.loader, fullname, trainer)
        return spec


def _patch_after(loader: Any, name: str, trainer: str) -> None:
    """Patches a trainer when its module has been loaded, once."""
    exec_module = loader.exec_module

    def exec_and_patch(module: ModuleType) -> None:
        exec_module(module)
        if module.__name__ == name and vars(loader).pop("exec_module", None):  # a loader may load others, too
            _patch(trainer)

    loader.exec_module = exec_and_patch


def _patch(trainer: str) -> None:
    from fastdpo.integrations import patching
    from fastdpo.logs import strict

    run = json.loads(os.environ[VARIABLE])
    _note(IMPORTED, trainer)
    try:
        _print(patching.patch(trainer, **run["options"]))
    except patching.PatchError as error:
        if strict():
            raise
        _print(str(error).removeprefix("patch: "))
    else:
        _note(PATCHED, trainer)
        atexit.register(_report_calls, trainer)


def _report_calls(trainer: str) -> None:
    from fastdpo.integrations import outcomes

    line = outcomes.line(trainer)
    if line is not None:
        _note(CALLED, trainer)
        _print(line)


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

        _print(outcomes.line_without_calls(patched, run["options"]))


def _print(line: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def _run_hidden_sitecustomize() -> None:
    here = Path(__file__).parent
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _start() -> None:
    run = json.loads(os.environ.get(VARIABLE, "null"))
    if run is not None:
        sys.meta_path.insert(0, _Finder(run["trainers"]))
        if run["pid"] == os.getpid():
            atexit.register(_report_nothing, run)


if __name__ == "sitecustomize":
    _start()
    _run_hidden_sitecustomize()
