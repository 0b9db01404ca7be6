"""Cuts the rows of an optimizer step into micro-batches by a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..prefix_tree import common_length

Ints = NDArray[np.int64]
Run = tuple[int, int]

COST_OF_A_RUN = 1 / 64
"""The part of the budget whose tokens must be saved by a further micro-batch."""


class RowPlanner:
    """Cuts rows into micro-batches of up to a number of distinct tokens, with rows that begin alike together.

    The rows are sorted by their tokens, so that each shares as much as it can with the row before it, and are cut
    into runs: as few as the budget allows, or more where this saves tokens that would be computed again, by
    `COST_OF_A_RUN`. Of cuts with the same cost, the most even one is taken.

    Args:
        rows: the tokens of each row of the step on one rank.
        share: whether rows share the tokens that they begin with, as in `patch`.
    """

    def __init__(self, rows: Sequence[NDArray[np.integer]], *, share: bool = True):
        self._order, self._lengths, shared = sorted_by_tokens(rows)
        self._shared = shared * share  # with the row before
        self._ends = np.cumsum(self._lengths - self._shared)

    def cut(self, max_tokens: int) -> list[Run]:
        """The runs of the sorted rows: for each, the place of its first row and that behind its last one.

        A row of more than `max_tokens` tokens is a run by itself.
        """
        total = int(self._lengths.sum())
        costs, first = [0.0], [0]  # of the first rows up to each place: of their runs, and where the last one begins
        for end in range(1, len(self._order) + 1):
            tokens = self._tokens(np.arange(end), end)
            fits = (tokens <= max_tokens) | (np.arange(end) == end - 1)
            uneven = (tokens / total) ** 2 / 256  # in all runs together less than the cost of a run or of a token
            of_runs = np.array(costs) + max_tokens * COST_OF_A_RUN + self._shared[:end] + uneven
            first.append(int(np.where(fits, of_runs, np.inf).argmin()))
            costs.append(float(of_runs[first[end]]))
        runs, end = [], len(self._order)
        while end:
            runs.append((first[end], end))
            end = first[end]
        return runs[::-1]

    def divided(self, runs: Sequence[Run], n: int) -> list[Run]:
        """At least n runs, of which the longest are divided where their rows share least. There must be n rows."""
        runs = list(runs)
        while len(runs) < n:
            longest = max((run for run in runs if run[1] - run[0] > 1), key=lambda run: self.tokens(*run))
            start, end = longest
            cuts = range(start + 1, end)
            middle = min(cuts, key=lambda i: (self._shared[i], max(self.tokens(start, i), self.tokens(i, end))))
            place = runs.index(longest)
            runs[place : place + 1] = [(start, middle), (middle, end)]
        return runs

    def rows(self, run: Run) -> list[int]:
        """The numbers of the rows of a run."""
        return self._order[slice(*run)].tolist()

    def tokens(self, start: int, end: int) -> int:
        """The distinct tokens of a run."""
        return int(self._tokens(np.array([start]), end)[0])

    def _tokens(self, starts: NDArray[np.int64], end: int) -> NDArray[np.int64]:
        return self._lengths[starts] + self._ends[end - 1] - self._ends[starts]


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
