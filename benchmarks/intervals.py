"""Medians, ratios and geometric means with bootstrap intervals.

The cost of a side is the mean over its batches of the median of the batch's samples. Intervals are
95 % percentile bootstrap intervals: the samples of every batch are resampled independently, with a
fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES, AT_ONCE = 9999, 1000
CONFIDENCE = 0.95

Batches = Sequence[Sequence[float]]
"""The samples of one side, batch by batch."""


class Estimate(NamedTuple):
    """A value and its interval.

    `low` and `high` are None if there are too few samples for an interval.
    """

    value: float
    low: float | None = None
    high: float | None = None


def median(side: Batches) -> Estimate:
    """The cost of a side, in the unit of its samples."""
    return _bootstrap([side], lambda cost: cost(0))


def ratio(a: Batches, b: Batches) -> Estimate:
    """The cost of `a` divided by the cost of `b`."""
    return _bootstrap([a, b], lambda cost: cost(0) / cost(1))


def geometric_mean_of_ratios(pairs: Sequence[tuple[Batches, Batches]]) -> Estimate:
    """Geometric mean of the ratios of several cases. Each pair holds numerator and denominator."""
    sides = [side for pair in pairs for side in pair]

    def mean(cost: Callable[[int], np.ndarray]) -> np.ndarray:
        logs = [np.log(cost(2 * i) / cost(2 * i + 1)) for i in range(len(pairs))]
        return np.exp(np.mean(logs, axis=0))

    return _bootstrap(sides, mean)


def _bootstrap(sides: Sequence[Batches], statistic: Callable[[Callable[[int], np.ndarray]], np.ndarray]) -> Estimate:
    """`statistic` receives a function from the index of a side to its cost in all resamples."""
    ends = np.cumsum([0, *map(len, sides)])
    data = [np.asarray(batch, dtype=float) for side in sides for batch in side]

    def statistic_of(batches: Sequence[np.ndarray]) -> np.ndarray:
        medians = [np.median(batch, axis=-1) for batch in batches]
        return statistic(lambda side: np.mean(medians[ends[side] : ends[side + 1]], axis=0))

    value = float(statistic_of(data))
    if min(map(len, data)) < 2:
        return Estimate(value)
    generator, found = np.random.default_rng(0), list[np.ndarray]()
    for begin in range(0, RESAMPLES, AT_ONCE):
        n = min(AT_ONCE, RESAMPLES - begin)
        found.append(statistic_of([x[generator.integers(len(x), size=(n, len(x)))] for x in data]))
    low, high = np.quantile(np.concatenate(found), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))
