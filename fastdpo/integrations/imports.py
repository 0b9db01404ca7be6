"""Calls a function as soon as the module of a trainer has been imported.

Needs nothing but the standard library: each process that `fastdpo run` starts loads this file.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


class ImportWatcher(importlib.abc.MetaPathFinder):
    """Finds modules by the finders that follow, each time: programs may only look for one, and an import that fails may
    succeed later.

    Args:
        trainers: the names of trainers, by their modules.
        imported: called with the name of a trainer when a module of it has been executed.
    """

    def __init__(self, trainers: Mapping[str, str], imported: Callable[[str], None]):
        self._trainers, self._imported = dict(trainers), imported

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        trainer = self._trainers.pop(fullname, None)  # so that the others find it
        if trainer is None:
            return None
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._trainers[fullname] = trainer
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader, fullname, trainer)
        return spec

    def _call_after(self, loader: Any, name: str, trainer: str) -> None:
        """Has a loader call `imported` after it has executed a module, once. Another watcher may do so as well."""
        exec_module, done = loader.exec_module, []

        def exec_and_call(module: ModuleType) -> None:
            exec_module(module)
            if module.__name__ == name and not done:  # a loader may load others, too
                done.append(name)
                if vars(loader).get("exec_module") is exec_and_call:
                    del loader.exec_module
                self._imported(trainer)

        loader.exec_module = exec_and_call
