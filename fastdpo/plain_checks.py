"""Checks of arguments that need neither torch nor NumPy, so that the command line makes them at once."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path

SHOWN = (str, bytes, int, float, complex, list, tuple, set, dict)
"""Types whose values are part of an error message, unless they are long. Scalars of NumPy are, too."""

LARGEST_INT = 2**63 - 1


def require(
    condition: bool, op: str, argument: str, rule: str, got: object, *sizes: object, error: type[Exception] = ValueError
) -> None:
    """Raises `error` unless the condition holds.

    `sizes` fill the braces of `rule`. They are formatted only in case of an error: under
    `torch.compile`, formatting a size makes it a constant of the graph.
    """
    if not condition:
        got = shown(got) if isinstance(got, int) else got
        raise error(f"{op}: {argument} must {rule.format(*sizes)}; got {got}")


def shown(value: object) -> str:
    """A value in an error message: itself if it is short, otherwise its type."""
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value) if value is None or isinstance(value, SHOWN) or _is("numpy", "generic", value) else ""
    except ValueError:  # Python prints no integer of more than 4,300 digits
        text = ""
    return text if 0 < len(text) <= 80 else f"a {type(value).__name__}"


def suggested(name: str, names: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the known name that is most similar to it, if any is."""
    similar = difflib.get_close_matches(name, [*names], n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def checked_path(op: str, argument: str, value: object, rule: str) -> Path:
    """The path that a string or an `os.PathLike` names."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"{op}: {argument} must {rule}; got {shown(value)}")
    require(bool(path.strip()) and "\0" not in path, op, argument, rule, repr(path))
    return Path(path)


def require_flags(op: str, **flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{op}: {name} must be True or False; got {shown(flag)}")


def require_integer(op: str, argument: str, value: object, rule: str) -> None:
    """Requires an integer of up to 64 bits, of Python or NumPy, that is not a bool."""
    if isinstance(value, bool) or not (isinstance(value, Integral) or _is("torch", "SymInt", value)):
        raise TypeError(f"{op}: {argument} must {rule}; got {shown(value)}")
    if isinstance(value, Integral):
        require(-LARGEST_INT - 1 <= int(value) <= LARGEST_INT, op, argument, "fit into 64 bits", value)


def require_positive_integer(op: str, argument: str, value: object, *, optional: bool = False) -> None:
    """Requires a positive integer, or None if it is optional."""
    if optional and value is None:
        return
    rule = f"be a positive integer{' or None' if optional else ''}"
    require_integer(op, argument, value, rule)
    require(value > 0, op, argument, rule, value)  # pyright: ignore[reportOperatorIssue]


def require_bytes(op: str, **numbers: object) -> None:
    rule = "be a number of bytes, an int of 0 or more, or None"
    for name, n in numbers.items():
        if n is not None:
            require_integer(op, name, n, rule)
            require(n >= 0, op, name, rule, n)  # pyright: ignore[reportOperatorIssue]


def _is(package: str, name: str, value: object) -> bool:
    """Whether a value has a type of a package, which is imported then."""
    module = sys.modules.get(package)
    return module is not None and isinstance(value, getattr(module, name))
