"""Rows that begin alike, and the order of an epoch in which they come into one batch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .. import checks
from ..data.columns import COLUMNS, read_columns, require_dataset
from ..prefix_tree import common_length

if TYPE_CHECKING:
    from datasets import Dataset

Ints = NDArray[np.int64]

LEAST_COMMON = 1 / 16
"""Rows are related if they begin with more common tokens than this part of the tokens of a mean row."""

LONGER = 9 / 8
"""A common beginning that is longer by less than this factor does not bring rows closer together: by chance, some
questions after a long system prompt begin with the same words.
"""


def sorted_by_tokens(rows: Iterable[Sequence[int] | NDArray[np.integer]]) -> tuple[Ints, Ints, Ints]:
    """Sorts rows by their tokens, so that each has most in common with its neighbours.

    Args:
        rows: the tokens of each of N rows.

    Returns:
        The numbers of the rows in sorted order, their lengths, and the number of tokens that each has in common with
        the one before it. int64 [N] each.
    """
    content = [np.asarray(row, np.int32).tobytes() for row in rows]
    order = sorted(range(len(content)), key=content.__getitem__)
    ids = (np.frombuffer(content[i], np.int32) for i in order)
    common = [0, *(common_length(a, b) for a, b in pairwise(ids))][: len(order)]
    lengths = [len(content[i]) // 4 for i in order]
    return np.array(order, np.int64), np.array(lengths, np.int64), np.array(common, np.int64)


class Kinship:
    """Which rows of a dataset begin alike, found by sorting them by their tokens.

    In sorted order, a row has most in common with its neighbours, and two rows have as much in common as the
    neighbours between them have at least.

    Args:
        rows: the tokens of each of N rows.
    """

    def __init__(self, rows: Iterable[Sequence[int] | NDArray[np.integer]]):
        order, lengths, common = sorted_by_tokens(rows)
        self._place = np.empty_like(order)
        self._place[order] = np.arange(len(order))
        self._common = np.append(common[1:], 0)  # with the next one
        self._least = LEAST_COMMON * lengths.sum() / max(len(order), 1)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._place)

    def sorted(self, rows: Sequence[int] | Ints) -> tuple[Ints, Ints]:
        """Sorts rows by their tokens.

        Args:
            rows: the numbers of M rows.

        Returns:
            Their places in `rows` in sorted order, and the number of tokens that each has in common with the one
            before it, or 0 if they are not related. int64 [M] each.
        """
        places = self._place[np.asarray(rows, np.int64)]
        order = np.argsort(places, kind="stable")
        common = np.zeros_like(places)
        common[1:] = np.minimum.reduceat(self._common, places[order])[:-1]
        common[common <= self._least] = 0
        return order, common

    def grouped(self, drawn: Sequence[int] | Ints, size: int, window: int | None = None) -> Ints:
        """Reorders the rows of an epoch such that relatives are in one batch, as far as they fit.

        Those with the longest common beginnings come together first. Of more relatives than fit into a batch, those
        that were drawn one after the other are in one batch. Batches are in the order in which one row of each was
        drawn. An epoch without relatives, or of nothing else, stays as it was drawn.

        Args:
            drawn: the numbers of the M rows in the order that a sampler has drawn.
            size: rows of a batch.
            window: number of batches within which a row stays: each `window` batches are reordered by themselves.
                Default: all of them are reordered together.

        Returns:
            The same numbers, int64 [M].

        Raises:
            TypeError, ValueError: the size or the window is not a positive integer.
        """
        checks.require_positive_integer("grouped", "size", size)
        checks.require_positive_integer("grouped", "window", window, optional=True)
        drawn = np.asarray(drawn, np.int64)
        step = size * window if window else max(len(drawn), 1)
        parts = [drawn[start : start + step] for start in range(0, len(drawn), step)]
        return np.concatenate([drawn[:0], *(part[self._grouped(part, size)] for part in parts)])

    def _grouped(self, rows: Ints, size: int) -> Ints:
        """The places of rows in their new order, of those at which they were drawn."""
        drawn_at, common = self.sorted(rows)  # of each row, in sorted order as all arrays here
        is_first = common == 0  # of a family
        group, keys = np.full(len(rows), -1), []
        while True:  # from the largest families to single rows
            family, firsts = np.cumsum(is_first) - 1, np.flatnonzero(is_first)
            fits = np.diff(firsts, append=len(rows))[family] <= size
            group = np.where(fits & (group < 0), firsts[family], group)
            # A family comes where one of its rows was drawn, always the same one: large ones come no earlier.
            keys.append(drawn_at[firsts][family])
            if is_first.all():
                break
            within = np.where(is_first, np.inf, common)
            is_first |= within < LONGER * np.minimum.reduceat(within, firsts)[family]
        order = np.lexsort(keys[::-1])
        ends = np.flatnonzero(np.diff(group[order])) + 1
        batches = _filled([drawn_at[np.sort(part)].tolist() for part in np.split(order, ends)], size)
        batches.sort(key=lambda batch: (len(batch) < size, batch[0]))
        return np.concatenate([np.array(batch, np.int64) for batch in batches])


def _filled(groups: list[list[int]], size: int) -> list[list[int]]:
    """Batches of groups of up to `size` rows: each has the first groups that fit, and a part of the first group that
    is left if none does. The last batch may have fewer rows.
    """
    waiting: defaultdict[int, deque[tuple[int, list[int]]]] = defaultdict(deque)  # by their numbers of rows
    for place, rows in enumerate(groups):
        waiting[len(rows)].append((place, rows))
    batches: list[list[int]] = [[]]
    while left := [of_size[0] for of_size in waiting.values() if of_size]:
        if len(batches[-1]) == size:
            batches.append([])
        room = size - len(batches[-1])
        place, rows = min((group for group in left if len(group[1]) <= room), default=min(left))
        waiting[len(rows)].popleft()
        batches[-1] += rows[:room]
        if len(rows) > room:
            waiting[len(rows) - room].appendleft((place, rows[room:]))  # before all others
    return batches


def kinship_of(
    dataset: Dataset | Sequence[Mapping], columns: Sequence[str] = COLUMNS[:2], *, op: str = "kinship_of"
) -> Kinship:
    """The kinship of pairs, by their chosen rows.

    Args:
        dataset: has these columns.
        columns: those that a chosen row consists of, one after the other.
        op: the public function, for error messages.

    Raises:
        TypeError, ValueError: a column of the dataset is malformed.
    """
    require_dataset(op, dataset)
    parts = (
        [np.split(ids, sizes.cumsum()[:-1]) for ids, sizes in of_columns]
        for of_columns in read_columns(op, dataset, columns)
    )
    return Kinship(np.concatenate(row) for rows in parts for row in zip(*rows, strict=True))
