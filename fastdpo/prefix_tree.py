"""The prefix tree of rows: what each row has in common with rows before it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_SAVING = 1 / 32
"""A piece of a prefix is not shared for less than this part of the tokens that the row then stores.

Rows begin alike by chance, or with the header of a chat template. Every piece costs attention some
time, and a header would make one tree out of all rows of a batch.
"""


class Branch(NamedTuple):
    """How a row is stored.

    Attributes:
        parent: the row before it that holds the tokens that both begin with; itself if it shares
            none.
        shared: the number of these tokens. The row stores the others.
        root: the first row of its tree.
    """

    parent: int
    shared: int
    root: int


def prefix_tree(rows: Sequence[NDArray[np.int64]], groups: Sequence[int]) -> list[Branch]:
    """Stores tokens that rows begin with once.

    A row shares with the row before it, of the same group, that it has the most tokens in common
    with. These tokens are in one piece if that row stores all of them, and in several if it shares
    some itself. Pieces that save little are stored again: the last ones of several pieces, and
    others of a row that has more in common with rows after it.

    Args:
        rows: the tokens of each row.
        groups: only rows with the same number share.
    """
    nearest = _nearest(rows, groups)
    in_common = [0] * len(rows)  # of each row, the most tokens that a row after it shares
    for parent, shared in nearest:
        in_common[parent] = max(in_common[parent], shared)
    branches: list[Branch] = []
    pieces: list[list[int]] = []  # of each row, the positions at which the pieces of its tokens begin
    for i, (parent, shared) in enumerate(nearest):
        starts = [start for start in pieces[parent] if start < shared] if shared else []
        while starts and shared - starts[-1] < LEAST_SAVING * (len(rows[i]) - shared):
            if len(starts) == 1 and in_common[i] <= shared:
                break
            shared = starts.pop()
        branches.append(Branch(parent, shared, branches[parent].root) if shared else Branch(i, 0, i))
        pieces.append([*starts, shared])
    return branches


def _nearest(rows: Sequence[NDArray[np.int64]], groups: Sequence[int]) -> list[tuple[int, int]]:
    """For each row, the row before it of its group that begins most alike, and the tokens in common.

    In a sorted list of the rows up to this one, that is one of its two neighbours.
    """
    content = [row.tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (groups[i], content[i]))
    before, after = [-1] * (len(rows) + 1), [-1] * (len(rows) + 1)  # a ring, whose two ends meet at index -1
    common = [0] * (len(rows) + 1)  # with the row before
    for a, b in pairwise([-1, *order, -1]):
        after[a], before[b] = b, a
        if -1 not in (a, b) and groups[a] == groups[b]:
            common[b] = common_length(rows[a], rows[b])
    nearest = [(0, 0)] * len(rows)
    for i in reversed(range(len(rows))):
        a, b = before[i], after[i]
        nearest[i] = (a, common[i]) if common[i] >= common[b] else (b, common[b])
        after[a], before[b], common[b] = b, a, min(common[i], common[b])
    return nearest


def common_length(a: NDArray[np.integer], b: NDArray[np.integer]) -> int:
    """The number of tokens that two rows begin with."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
