"""Whether the functions of a package that a trainer line relies on are those that were tested.

Their parameters must be those that the line names. `tested_code.json` has the fingerprints of their code in
the newest versions that were tested, with those of all functions that they reach in their package. A newer
version is admitted by them: its number says nothing about its code.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType
from typing import Any

from ...reasons import Reason
from .fingerprints import code_hash, inner, name_of, package_of, reached, text_hash

TESTED = Path(__file__).with_name("tested_code.json")

VARIABLE = "FASTDPO_PROVISIONAL"
"""The environment variable that is 0 where versions newer than the tested ones are not supported."""

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


@functools.cache
def tested() -> dict[str, list[str]]:
    """The recorded hashes by the names of functions and constants: of what they do, and of their texts."""
    return json.loads(TESTED.read_text(encoding="utf-8"))


def has_tested(package: str) -> bool:
    """Whether functions of a package are recorded."""
    return any(package_of(name) == package for name in tested())


def set_newer(package: str, is_newer: bool) -> None:
    """Notes whether a package is newer than the tested versions."""
    (_newer.add if is_newer else _newer.discard)(package)


def is_newer(function: Any) -> bool:
    """Whether a function is one of a package that is newer than the tested versions."""
    return callable(function) and package_of(name_of(function)) in _newer


def changed(functions: dict[str, Callable], package: str) -> dict[str, list[str]]:
    """By the names of those functions of a package that differ from the tested ones: what differs in
    their reach, which ends where that of another one begins.
    """
    differences.cache_clear()
    own = {name: function for name, function in functions.items() if package_of(name) == package}
    return {name: found for name, function in own.items() if (found := differences(function, frozenset(own)))}


def is_tested(function: Callable) -> bool:
    """Whether a function is one of a tested version, or has the same code, as all that it reaches."""
    return not is_newer(function) or not differences(function)


@functools.cache
def differences(function: Callable, ends: frozenset[str] = frozenset()) -> list[str]:
    """The names of the functions and constants in the reach of a function that are not as they were tested.

    Args:
        function: the function.
        ends: the names of other functions, at which its reach ends.
    """
    found = inner(function)
    reach = reached(found, ends) if isinstance(found, FunctionType) else {name_of(found): found}
    return [name for name, value in reach.items() if not is_recorded(name, value)]


def is_recorded(name: str, value: object) -> bool:
    """Whether a function or a constant has a recorded text, or else does what was recorded."""
    recorded = tested().get(name, ())
    return text_hash(value) in recorded or (isinstance(value, FunctionType) and code_hash(value) in recorded)


def differences_in(functions: Iterable[tuple[str, str, Any]], newer: Collection[str]) -> tuple[str, ...]:
    """The names of functions that are not as they were tested, or are not where they were, in newer packages.

    Args:
        functions: as those of `TrainerLine.relied_on`.
        newer: the packages that are newer than the tested versions.
    """

    def is_tested(package: str, function: Any) -> bool:
        if function is None:
            return False
        name = name_of(function)
        return package_of(name) == package and is_recorded(name, function)

    found = (name for name, package, x in functions if package in newer and not is_tested(package, x))
    return tuple(dict.fromkeys(found))


def signature_difference(owner: object, name: str, expected: list[str], *, exact: bool = True) -> Reason | None:
    """Returns how the parameters of a function differ from the expected ones, or None.

    Notes the function as one that is relied on (`noting`). One of a version newer than the tested
    ones may have further parameters with defaults, which its code then reads: that has changed, too.

    Args:
        owner: the class or module that has the function, or should have it.
        name: of the function.
        expected: names of parameters, in order.
        exact: whether there may be no further parameters after them.
    """
    function = getattr(owner, name, None)
    note(function)
    parameters = None if function is None else inspect.signature(function).parameters
    if parameters is not None and _are_expected(name, parameters, expected, exact, is_newer(function)):
        return None
    parameters = parameters and list(parameters)
    rule = "have" if exact else "begin with"
    function = f"{getattr(owner, '__name__', owner)}.{name}"
    return Reason("different-code", difference=f"{function} must {rule} the parameters {expected}; got {parameters}")


def _are_expected(
    name: str, parameters: Mapping[str, inspect.Parameter], expected: list[str], exact: bool, is_newer: bool
) -> bool:
    names = list(parameters)
    if names == expected or (names[: len(expected)] == expected and not exact):
        return True
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    others = [x for other, x in parameters.items() if other not in expected]
    if not is_newer or not all(x.default is not x.empty or x.kind in variable for x in others):
        return False
    # `__init__` is called with names. Other functions may be given their arguments in order.
    return (names if name != "__init__" else [x for x in names if x in expected])[: len(expected)] == expected


def first_difference(owner: object, parameters: Mapping[str, list[str]], *, exact: bool = True) -> Reason | None:
    """The first `signature_difference` among functions, given their parameters by name."""
    differences = (signature_difference(owner, name, expected, exact=exact) for name, expected in parameters.items())
    return next((each for each in differences if each is not None), None)


def field_difference(kind: type, expected: set[str], *, may_have_more: bool = False) -> Reason | None:
    """Returns how the fields of a dataclass differ from the expected ones, or None."""
    names = {field.name for field in dataclasses.fields(kind)}
    if names == expected or (may_have_more and names > expected):
        return None
    difference = f"{kind.__name__} must have the fields {sorted(expected)}; got {sorted(names)}"
    return Reason("different-code", difference=difference)
