"""Whether functions whose code is relied on are those of the newest versions that were tested.

Trainer lines name them (`TrainerLine.relies_on`). `tested_code.json` has a hash of the text of each.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, cast

PATH = Path(__file__).with_name("tested_code.json")


@functools.cache
def hashes() -> dict[str, str]:
    """The recorded hashes, by the names under which lines look up the functions."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def has_tested(package: str) -> bool:
    """Whether functions of a package are recorded."""
    return any(name.startswith(f"{package}.") for name in hashes())


def hash_of(function: Any) -> str | None:
    """A hash of the text of a function, without wrappers around it. None if it has no text that can be read."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return None


def called_by(function: Any, package: str) -> Iterator[tuple[str, Any]]:
    """The functions of a package that a function of it calls by their names, with their full names."""
    function = inspect.unwrap(function) if callable(function) else None
    for name in function.__code__.co_names if isinstance(function, FunctionType) else ():
        called = cast(FunctionType, function).__globals__.get(name)
        if isinstance(called, FunctionType) and called.__module__.partition(".")[0] == package:
            yield f"{called.__module__}.{name}", called


def code_of(line: Any, functions: Iterable[str]) -> dict[str, Any]:
    """Functions of a `TrainerLine` by their full names, and those by which the trainer class overrides them. None for
    those that are missing.
    """
    found: dict[str, Any] = {}
    for written in functions:
        name, function = line.function(written)
        found[name] = function
        owner, _, method = written.rpartition(".")
        base = line.function(owner)[1] if ":" in owner else None
        if isinstance(base, type) and issubclass(line.trainer_class(), base):
            overriding_name, overriding = line.function(method)
            if overriding is not function:
                found[overriding_name] = overriding
    return found


def code_relied_on(line: Any) -> dict[str, Any]:
    """`code_of` what a line relies on, with the functions of the trainer's package that these call by name."""
    found = code_of(line, line.relies_on)
    called = {name: x for function in found.values() for name, x in called_by(function, line.package)}
    return found | {name: x for name, x in called.items() if all(x is not y for y in found.values())}


def differing(functions: Mapping[str, Any], packages: Collection[str]) -> list[str]:
    """The names of those functions of these packages that have another text than was recorded, or none. One that is
    missing is None.
    """
    found = {name: hash_of(x) for name, x in functions.items() if name.partition(".")[0] in packages}
    return [name for name, x in found.items() if x is None or x != hashes().get(name)]
