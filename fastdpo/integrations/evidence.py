"""Whether the functions of a package that a trainer line relies on are those that were tested.

`tested_code.json` has their fingerprints in the newest versions that were tested. A newer version is
admitted by them: its number says nothing about its code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

TESTED = Path(__file__).with_name("tested_code.json")

VARIABLE = "FASTDPO_PROVISIONAL"
"""The environment variable that is 0 where versions newer than the tested ones are not supported."""

_WITHOUT_EFFECT = {"annotation", "returns", "type_comment", "ctx", "kind"}
"""Fields of a syntax tree that do not change what a function does."""

_noted: ContextVar[dict[str, Callable] | None] = ContextVar("fastdpo_noted_functions", default=None)

_newer: set[str] = set()
"""The packages that were found in a version newer than the tested ones."""


def is_allowed() -> bool:
    """Whether versions newer than the tested ones may be supported."""
    return os.environ.get(VARIABLE, "1") != "0"


@contextmanager
def noting() -> Iterator[dict[str, Callable]]:
    """Collects the functions that trainer lines examine in the block, by their names."""
    functions: dict[str, Callable] = {}
    token = _noted.set(functions)
    try:
        yield functions
    finally:
        _noted.reset(token)


def note(function: Any) -> None:
    """Adds a function to those of `noting`, unless it is one that is only called, with all that it was given."""
    functions = _noted.get()
    if functions is not None and callable(function) and function.__name__ != "__init__":
        functions[name_of(function)] = function


def name_of(function: Callable) -> str:
    """The name of the function itself, without the decorators around it."""
    inner: Any = inspect.unwrap(function)
    return f"{inner.__module__}.{inner.__qualname__}"


@functools.cache
def tested() -> dict[str, str]:
    """The recorded fingerprints by the names of functions."""
    return json.loads(TESTED.read_text(encoding="utf-8"))


def has_tested(package: str) -> bool:
    """Whether functions of a package are recorded."""
    return any(name.partition(".")[0] == package for name in tested())


def changed(functions: dict[str, Callable], package: str) -> list[str]:
    """The names of those functions of a package, which is newer than the tested versions, that differ."""
    _newer.add(package)
    own = {name: function for name, function in functions.items() if name.partition(".")[0] == package}
    return [name for name, function in own.items() if fingerprint(function) != tested().get(name)]


def is_tested(function: Callable) -> bool:
    """Whether a function is one of a tested version, or has the same code."""
    name = name_of(function)
    return name.partition(".")[0] not in _newer or fingerprint(function) == tested().get(name)


@functools.cache
def fingerprint(function: Callable) -> str | None:
    """A hash of what a function does (see `hash_of`), or None if its source cannot be read."""
    try:
        return hash_of(inspect.getsource(inspect.unwrap(function)))
    except (OSError, SyntaxError, TypeError):
        return None


def hash_of(source: str) -> str:
    """A hash of the source of a function.

    Formatting, comments, docstrings, annotations and the names of local variables do not change it,
    and neither does the version of Python.
    """
    tree = ast.parse(textwrap.dedent(source))
    nodes = list(ast.walk(tree))
    interface = {node.arg for node in nodes if isinstance(node, ast.arg)}
    interface |= {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    stored = (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    local = {name: f"local {i}" for i, name in enumerate(dict.fromkeys(x for x in stored if x not in interface))}
    return hashlib.sha256(repr(_normalized(tree, local)).encode()).hexdigest()[:16]


def _normalized(node: object, local: dict[str, str]) -> object:
    if isinstance(node, list):
        return [_normalized(x, local) for x in node if not _is_docstring(x)]
    if isinstance(node, ast.Name):
        return local.get(node.id, node.id)
    if not isinstance(node, ast.AST):
        return node
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _WITHOUT_EFFECT}
    # A later Python may add fields, which are empty in earlier code.
    return type(node).__name__, [(name, _normalized(x, local)) for name, x in fields.items() if x not in (None, [])]


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
