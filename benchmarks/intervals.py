"""Medians, ratios and geometric means with bootstrap intervals.

The cost of a side is the mean over its batches of the median of the batch's samples. Intervals are
95 % percentile bootstrap intervals: the samples of every batch are resampled independently, with a
fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

RESAMPLES = 9999
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

    def statistic_of_batches(*batches: np.ndarray, axis: int = -1) -> np.ndarray:
        medians = [np.median(batch, axis=axis) for batch in batches]
        return statistic(lambda side: np.mean(medians[ends[side] : ends[side + 1]], axis=0))

    value = float(statistic_of_batches(*data))
    if min(map(len, data)) < 2:
        return Estimate(value)
    options = {"n_resamples": RESAMPLES, "confidence_level": CONFIDENCE, "method": "percentile", "batch": 1000}
    result = stats.bootstrap(
        data, statistic_of_batches, paired=False, vectorized=True, rng=np.random.default_rng(0), **options
    )
    return Estimate(value, float(result.confidence_interval.low), float(result.confidence_interval.high))
