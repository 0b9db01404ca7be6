"""Groups rows by what they begin with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class _Group(NamedTuple):
    """Rows that store their common prefix once.

    Attributes:
        rows: their indices.
        saved: the tokens that this saves.
    """

    rows: list[int]
    saved: int


def groups_by_content(rows: Sequence[NDArray[np.int64]]) -> list[int]:
    """Divides rows into groups, each of which stores the prefix that all of its rows share once.

    A group of k rows with a common prefix of d tokens saves (k - 1) * d tokens. The nodes of the
    rows' prefix tree are visited from its leaves to its root. At each, those groups are joined that
    then save more than on their own.

    Args:
        rows: the tokens of each row.

    Returns:
        For each row the smallest index of the rows in its group.
    """
    content = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=content.__getitem__)  # rows that begin alike become neighbours
    following = [_common(rows[a], rows[b]) for a, b in pairwise(order)]
    nodes: list[tuple[int, list[_Group]]] = []  # depth and groups of the nodes above a row, root first
    for row, depth in zip(order, [*following, 0], strict=True):
        groups = [_Group([row], 0)]
        while nodes and nodes[-1][0] > depth:
            node_depth, others = nodes.pop()
            groups = _joined(others + groups, node_depth)
        if not nodes or nodes[-1][0] < depth:
            nodes.append((depth, []))
        nodes[-1][1].extend(groups)
    group_of = [0] * len(rows)
    for group in (group for _, groups in nodes for group in groups):
        for row in group.rows:
            group_of[row] = min(group.rows)
    return group_of


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """The number of tokens that two rows begin with."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _joined(groups: list[_Group], depth: int) -> list[_Group]:
    """The groups of a node of the prefix tree."""
    gains = [len(group.rows) * depth - group.saved for group in groups]
    if sum(gain for gain in gains if gain > 0) <= depth:  # one row of a group saves nothing
        return groups
    rows = [row for group, gain in zip(groups, gains, strict=True) if gain > 0 for row in group.rows]
    kept = [group for group, gain in zip(groups, gains, strict=True) if gain <= 0]
    return [*kept, _Group(rows, (len(rows) - 1) * depth)]
