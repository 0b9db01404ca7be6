"""Calls of a function that a test records while the function does what it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


def result_of(result: Any, *args: Any, **options: Any) -> Any:
    return result


def recorded_calls(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any] = result_of
) -> list[Any]:
    """A list to which what `note` returns is appended after each following call of a function or method.

    `note` is called with the result and the arguments of the call, and returns the result by default.
    """
    own, recorded = getattr(owner, name), []

    @functools.wraps(own)
    def call(*args: Any, **options: Any) -> Any:
        result = own(*args, **options)
        recorded.append(note(result, *args, **options))
        return result

    monkeypatch.setattr(owner, name, call)
    return recorded
