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


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, and then patches its trainer."""

    def __init__(self, inner: Any, trainer: str):
        self._inner, self._trainer = inner, trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        _patch(self._trainer)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of trainers, each once, by the finders that follow."""

    def __init__(self, trainers: dict[str, str]):
        self._trainers = dict(trainers)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        trainer = self._trainers.pop(fullname, None)
        if trainer is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, trainer)
        return spec


def _patch(trainer: str) -> None:
    from fastdpo.integrations import patching
    from fastdpo.logs import strict

    run = json.loads(os.environ[VARIABLE])
    with Path(run["imported"]).open("a") as file:
        file.write(f"{trainer}\n")
    try:
        _print(patching.patch_for_run(trainer, run["options"]))
    except patching.PatchError as error:
        if strict():
            raise
        _print(str(error).removeprefix("patch: "))
    else:
        atexit.register(_report_calls, trainer)


def _report_calls(trainer: str) -> None:
    from fastdpo.integrations import outcomes

    line = outcomes.line(trainer)
    if line is not None:
        _print(line)


def _report_nothing(imported: Path, supported: str) -> None:
    crashed = hasattr(sys, "last_value")  # set by an exception that nobody has caught
    if not crashed and (not imported.exists() or not imported.read_text()):
        _print(f"fastdpo: off, the program has imported none of {supported} [nothing-imported]")
    imported.unlink(missing_ok=True)


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
            atexit.register(_report_nothing, Path(run["imported"]), ", ".join(sorted(set(run["trainers"].values()))))


if __name__ == "sitecustomize":
    _start()
    _run_hidden_sitecustomize()
