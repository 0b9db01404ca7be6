"""Chooses the cases of a parametrized test that `--quick` runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any


def each_value_once(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of some cases that have, together, every value of every parameter.

    Each choice has the most values that no earlier one has: of a grid, about as many cases are left as its longest
    axis has values.
    """
    values = [{_key(name, value) for name, value in case.items()} for case in cases]
    missing: set[Hashable] = set().union(*values)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(values[i] & missing))
        missing -= values[best]
        chosen.append(best)
    return sorted(chosen)


def _key(name: str, value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return name, id(value)
    return name, type(value), value
