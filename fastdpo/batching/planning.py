"""Cuts the pairs of an optimizer step into micro-batches by a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .. import checks
from ..lengths import PairLengths
from .cost import CostModel

Bins = list[list[int]]
"""The pairs of each micro-batch, as places in the pairs of the step."""


class StepPlanner:
    """Cuts the pairs of an optimizer step into micro-batches of up to `max_tokens` packed tokens.

    All ranks have the same number of micro-batches, the smallest that is found, and none is empty.
    Their costs are balanced: pairs go to the micro-batch with the lowest cost that has room,
    expensive pairs first. If that takes more micro-batches than best fit does, best fit decides.

    Args:
        lengths: of all N pairs of the dataset.
        max_tokens: of a micro-batch on a rank, after packing: the distinct tokens of its pairs.
        ranks: number of ranks.
        cost: what pairs are balanced by. Default: their tokens.
        share_prompts: whether the rows of a pair share their first tokens, as in `patch`.
        op: the public function, for error messages.

    Raises:
        TypeError, ValueError: an argument is malformed, or a pair has more than `max_tokens` tokens.
    """

    def __init__(
        self,
        lengths: PairLengths,
        max_tokens: int,
        *,
        ranks: int = 1,
        cost: CostModel | None = None,
        share_prompts: bool = True,
        op: str = "StepPlanner",
    ):
        for name, value in (("max_tokens", max_tokens), ("ranks", ranks)):
            checks.require_positive_integer(op, name, value)
        checks.require_flags(op, share_prompts=share_prompts)
        self.max_tokens, self.ranks = int(max_tokens), int(ranks)
        self.lengths = lengths
        tokens = lengths.packed(share=share_prompts)
        self._tokens, self._costs = tokens, (cost or CostModel()).costs(lengths, share=share_prompts)
        self._op = op
        too_long = np.flatnonzero(tokens > max_tokens)
        if len(too_long):
            longest = int(tokens.max())
            raise ValueError(
                f"{op}: max_tokens must be at least the distinct tokens of every pair; got {max_tokens}, but pair "
                f"{too_long[0]} has {tokens[too_long[0]]}, as {len(too_long)} of {len(lengths)} pairs have more. "
                f"Set max_tokens to {longest} or more, truncate by max_length, or remove these pairs"
            )

    def cut(self, pairs: Sequence[int] | np.ndarray, max_tokens: int | None = None) -> list[list[list[int]]]:
        """The micro-batches of a step.

        Args:
            pairs: indices of the pairs of the step on all ranks. Their number is a positive
                multiple of the number of ranks.
            max_tokens: of this step, at least those of each of its pairs. Default: those of the planner.

        Returns:
            For each micro-batch and each rank, the indices of its pairs in the given order. The
            most expensive micro-batches come first.

        Raises:
            ValueError: the number of pairs breaks the rule above.
        """
        index, max_tokens = np.asarray(pairs, dtype=np.int64), max_tokens or self.max_tokens
        if not len(index) or len(index) % self.ranks:
            rule = f"be a positive number of pairs that {self.ranks} ranks divide"
            raise ValueError(f"{self._op}: pairs must {rule}; got {len(index)}")

        def cost_of(places: list[int]) -> float:
            return self.cost_of(index[places])

        sizes, weights = self._tokens[index].tolist(), self._costs[index].tolist()
        count = max(1, -(-sum(sizes) // (max_tokens * self.ranks)))
        while True:  # ends at the latest when each pair has a micro-batch of its own
            packed = _balanced(sizes, weights, max_tokens, count * self.ranks)
            packed = packed or _best_fit(sizes, max_tokens, count * self.ranks)
            if packed is not None:
                break
            count += 1
        bins = _without_empty([sorted(places) for places in packed], cost_of)
        return [[index[places].tolist() for places in of_ranks] for of_ranks in _dealt(bins, cost_of, self.ranks)]

    def tokens_of(self, pairs: Sequence[int] | np.ndarray) -> int:
        """The distinct tokens of a micro-batch, at most: pairs may share tokens by chance."""
        return int(self._tokens[np.asarray(pairs)].sum())

    def cost_of(self, pairs: Sequence[int] | np.ndarray) -> float:
        """The cost of a micro-batch."""
        return float(self._costs[np.asarray(pairs)].sum())


def _descending(values: Sequence[float]) -> list[int]:
    return np.argsort(-np.asarray(values), kind="stable").tolist()


def _filled(
    order: Sequence[int], sizes: Sequence[int], weights: Sequence[float], capacity: int, n_bins: int
) -> Bins | None:
    """Puts each item, in this order, into the bin with the lowest weight that has room for it.

    Returns None if an item does not fit.
    """
    bins: Bins = [[] for _ in range(n_bins)]
    room, weight = np.full(n_bins, capacity), np.zeros(n_bins)
    for item in order:
        i = int(np.where(room >= sizes[item], weight, np.inf).argmin())  # the first of several
        if room[i] < sizes[item]:
            return None
        bins[i].append(item)
        room[i] -= sizes[item]
        weight[i] += weights[item]
    return bins


def _balanced(sizes: list[int], weights: list[float], capacity: int, n_bins: int) -> Bins | None:
    """Puts each item into the lightest bin that has room for it, the heaviest item first."""
    return _filled(_descending(weights), sizes, weights, capacity, n_bins)


def _best_fit(sizes: list[int], capacity: int, n_bins: int) -> Bins | None:
    """Puts each item into the bin with the least room that suffices, the largest item first."""
    return _filled(_descending(sizes), sizes, [-size for size in sizes], capacity, n_bins)


def _without_empty(bins: Bins, cost_of: Callable[[list[int]], float]) -> Bins:
    """Moves a pair into each empty bin, from the most expensive bin that has several."""
    for empty in (places for places in bins if not places):
        source = max((places for places in bins if len(places) > 1), key=cost_of)
        empty.append(source.pop())
    return bins


def _dealt(bins: Bins, cost_of: Callable[[list[int]], float], ranks: int) -> list[Bins]:
    """Gives ranks micro-batches of similar costs at the same time, and similar costs in total."""
    costs = [cost_of(places) for places in bins]
    order = _descending(costs)
    totals = np.zeros(ranks)
    dealt = []
    for start in range(0, len(order), ranks):
        of_ranks: Bins = [[] for _ in range(ranks)]
        for i, rank in zip(order[start : start + ranks], np.argsort(totals, kind="stable"), strict=True):
            of_ranks[rank] = bins[i]
            totals[rank] += costs[i]
        dealt.append(of_ranks)
    return dealt
