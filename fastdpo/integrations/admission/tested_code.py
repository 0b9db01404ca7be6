"""Whether functions whose code is relied on are those of the newest versions that were tested.

Trainer lines name them (`TrainerLine.relies_on`). `tested_code.json` has a hash of the text of each.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
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


def differing(functions: Mapping[str, Any]) -> list[str]:
    """The names of those functions that have another text than was recorded, or none. One that is missing is None."""
    return [name for name, x in functions.items() if (found := hash_of(x)) is None or found != hashes().get(name)]
