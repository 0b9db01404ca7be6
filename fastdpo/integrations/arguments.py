"""Checks the options of `patch()`, which trainers and processes that are created later use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .. import plain_checks as checks
from .. import storage
from ..logs import warn
from .protocol import PatchOptions

NAMES = tuple(field.name for field in fields(PatchOptions))

REMOVED = {
    "log_savings": "the line of calls, logged at the first log and at the end, has its numbers",
    "longest_first": "`fastdpo estimate` predicts the memory of the largest batch, and max_tokens bounds it",
}
"""Options that were removed, and what replaces them. They are ignored with a warning for one version."""


def checked_options(op: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `patch()` as `PatchOptions` holds them. Logs a warning for each that was removed.

    Args:
        op: the public function, for its error messages.
        given: by name, those that were given. An integer may be one of NumPy, and the directory of
            `reference_memory` need not exist.

    Raises:
        TypeError, ValueError: an option is unknown, or has the wrong type or value.
    """
    for name in given.keys() & REMOVED.keys():
        warn(f"{op}: {name} was removed and is ignored: {REMOVED[name]}")
    remaining = {name: value for name, value in given.items() if name not in REMOVED}
    for name in remaining:
        if name not in NAMES:
            raise TypeError(
                f"{op}: options must be among {', '.join(NAMES)}; got {name}{checks.suggested(name, NAMES)}"
            )
    return {name: _checked(op, name, value) for name, value in remaining.items()}


def _checked(op: str, name: str, value: Any) -> object:
    if name == "share_prompts":
        if isinstance(value, bool) or (isinstance(value, str) and value == "deterministic"):
            return value
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f'{op}: share_prompts must be True, False or "deterministic"; got {checks.shown(value)}')
    if name == "memory_budget":
        checks.require_bytes(op, memory_budget=value)
        return None if value is None else int(value)
    if name == "max_tokens":
        checks.require_positive_integer(op, name, value, optional=True)
        return None if value is None else int(value)
    if name == "reference_memory" and not isinstance(value, bool):
        rule = "be True, False or the path or URL of a directory"
        directory = str(storage.checked_directory(op, name, value, rule))
        return directory if storage.is_url(directory) else str(Path(directory).resolve())
    checks.require_flags(op, **{name: value})
    return value
