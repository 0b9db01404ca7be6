"""Chooses the cases of a parametrized test that `--quick` runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from heapq import heapify, heapreplace
from typing import Any


def each_value_once(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of a subset of the cases that contains every value of every parameter.

    Greedy: each choice adds the most values that are still missing. A grid is reduced to about as
    many cases as its longest axis has values.
    """
    values = [{_key(name, value) for name, value in case.items()} for case in cases]
    missing: set[Hashable] = set().union(*values)
    chosen: list[int] = []
    bounds = [(-len(of_case), i) for i, of_case in enumerate(values)]  # what a case adds can only become less
    heapify(bounds)
    while missing:
        _, i = bounds[0]
        added = values[i] & missing
        heapreplace(bounds, (-len(added), i))
        if bounds[0][1] == i:
            missing -= added
            chosen.append(i)
    return sorted(chosen)


def _key(name: str, value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return name, id(value)
    return name, type(value), value
