"""Cuts the rows of an optimizer step into micro-batches by a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..prefix_tree import common_length

Row = tuple[NDArray[np.int64], NDArray[np.int64]]
"""The tokens of a prompt and of its completion."""

Run = tuple[int, int]

COST_OF_A_RUN = 1 / 64
"""The part of the budget whose tokens must be saved by a further micro-batch."""


class RowPlanner:
    """Cuts rows into micro-batches of up to a number of distinct tokens, with rows that begin alike together.

    The rows are sorted by their tokens, so that each shares as much as it can with the row before it, and are cut
    into runs: as few as the budget allows, or more where this saves tokens that would be computed again, by
    `COST_OF_A_RUN`. Of cuts with the same cost, the most even one is taken.

    Args:
        rows: of the step on one rank.
        share: whether rows of the same prompt share the tokens that they begin with, as in `patch`.
    """

    def __init__(self, rows: Sequence[Row], *, share: bool = True):
        content = [(prompt.tobytes(), completion.tobytes()) for prompt, completion in rows]
        self._order = sorted(range(len(rows)), key=content.__getitem__)
        self._lengths = np.array([sum(map(len, rows[i])) for i in self._order])
        self._shared = np.zeros_like(self._lengths)  # with the row before
        for place, (a, b) in enumerate(zip(self._order, self._order[1:] if share else (), strict=False), 1):
            if content[a][0] == content[b][0]:
                self._shared[place] = len(rows[b][0]) + common_length(rows[a][1], rows[b][1])
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
        return self._order[slice(*run)]

    def tokens(self, start: int, end: int) -> int:
        """The distinct tokens of a run."""
        return int(self._tokens(np.array([start]), end)[0])

    def _tokens(self, starts: NDArray[np.int64], end: int) -> NDArray[np.int64]:
        return self._lengths[starts] + self._ends[end - 1] - self._ends[starts]
