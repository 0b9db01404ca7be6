"""Cuts the units of an optimizer step, rows or pairs of them, into micro-batches by a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ....ops.memory import Size
from ....prefix_tree import common_length

Unit = Sequence[NDArray[np.integer]]
"""The tokens of each row of a unit."""
Run = tuple[int, int]

COST_OF_A_RUN = 1 / 64
"""The part of the budget whose tokens must be saved by a further micro-batch."""


class UnitPlanner:
    """Cuts units into micro-batches of up to a number of distinct tokens, with units that begin alike together.

    The units are sorted by the tokens of their first rows, so that each shares as much as it can with the one before
    it, and are cut into runs: as few as the budget allows, or more where this saves tokens that would be computed
    again, by `COST_OF_A_RUN`. Of cuts with the same cost, the most even one is taken.

    Args:
        units: the tokens of the rows of each unit of the step on one rank.
        kinds: of the units. Those of different kinds are in different runs. Default: all are of one kind.
        share: whether rows share the tokens that they begin with, as in `patch`.
        scored: the scored tokens of each unit. Default: unknown.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        kinds: Sequence[float] | None = None,
        *,
        share: bool = True,
        scored: Sequence[int] | None = None,
    ):
        self._scored = scored or [0] * len(units)
        kinds = kinds or [0] * len(units)
        content = [np.asarray(first, np.int32).tobytes() for first, *_ in units]
        order = sorted(range(len(units)), key=lambda i: (kinds[i], content[i]))
        self._order, self._kinds = np.array(order), np.array([kinds[i] for i in order])
        new = [_new_tokens(units[i], (), share) for i in order]
        beyond = [_new_tokens(units[i], units[j] if kinds[i] == kinds[j] else (), share) for j, i in pairwise(order)]
        self._lengths = np.array(new)
        self._shared = self._lengths - [*new[:1], *beyond]  # with the unit before
        self._ends = np.cumsum(self._lengths - self._shared)

    def cut(self, max_tokens: int) -> list[Run]:
        """The runs of the sorted units: for each, the place of its first unit and that behind its last one.

        A unit of more than `max_tokens` tokens is a run by itself.
        """
        total = int(self._lengths.sum())
        costs, first = [0.0], [0]  # of the first units up to each place: of their runs, and where the last one begins
        for end in range(1, len(self._order) + 1):
            tokens = self._tokens(np.arange(end), end)
            fits = (tokens <= max_tokens) & (self._kinds[:end] == self._kinds[end - 1]) | (np.arange(end) == end - 1)
            uneven = (tokens / total) ** 2 / 256  # in all runs together less than the cost of a run or of a token
            of_runs = np.array(costs) + max_tokens * COST_OF_A_RUN + self._shared[:end] + uneven
            first.append(int(np.where(fits, of_runs, np.inf).argmin()))
            costs.append(float(of_runs[first[end]]))
        runs, end = [], len(self._order)
        while end:
            runs.append((first[end], end))
            end = first[end]
        return runs[::-1]

    def fitting(self, most: int, least: int, fits: Callable[[Size], bool]) -> list[Run]:
        """The same up to `most` tokens, or to fewer where one of more than `least` does not fit."""
        runs = self.cut(most)
        while most > least and not all(self.tokens(*run) <= least or fits(self.size(run)) for run in runs):
            most = max(least, most * 7 // 8)
            runs = self.cut(most)
        return runs

    def divided(self, runs: Sequence[Run], n: int) -> list[Run]:
        """At least n runs, of which the longest are divided where their units share least. There must be n units."""
        runs = list(runs)
        while len(runs) < n:
            longest = max((run for run in runs if run[1] - run[0] > 1), key=lambda run: self.tokens(*run))
            start, end = longest
            cuts = range(start + 1, end)
            middle = min(cuts, key=lambda i: (self._shared[i], max(self.tokens(start, i), self.tokens(i, end))))
            place = runs.index(longest)
            runs[place : place + 1] = [(start, middle), (middle, end)]
        return runs

    def units(self, run: Run) -> list[int]:
        """The numbers of the units of a run."""
        return self._order[slice(*run)].tolist()

    def size(self, run: Run) -> Size:
        """The distinct tokens of a run, and its scored ones, at least one."""
        return self.tokens(*run), max(sum(self._scored[i] for i in self.units(run)), 1)

    def tokens(self, start: int, end: int) -> int:
        """The distinct tokens of a run."""
        return int(self._tokens(np.array([start]), end)[0])

    def _tokens(self, starts: NDArray[np.int64], end: int) -> NDArray[np.int64]:
        return self._lengths[starts] + self._ends[end - 1] - self._ends[starts]


def _new_tokens(unit: Unit, known: Unit, share: bool) -> int:
    """The tokens of a unit that no row before begins with: no known one, and no other one of the unit."""
    rows, tokens = [*known], 0
    for row in unit:
        tokens += len(row) - max((common_length(row, other) for other in rows if share), default=0)
        rows.append(row)
    return tokens
