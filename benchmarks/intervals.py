"""Medians, ratios of medians and their geometric means, with bootstrap intervals; exponents of power laws.

A side's cost is the mean over its batches of the median of each batch's samples. Intervals cover 95 %: percentiles of
the same number of resamples of every batch's samples, drawn independently, the same ones each time.
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
    """A value and the ends of its interval; None where there are too few samples for one."""

    value: float
    low: float | None = None
    high: float | None = None


def median(side: Batches) -> Estimate:
    """In the unit of the samples."""
    return _bootstrap([side], lambda cost: cost(0))


def ratio(a: Batches, b: Batches) -> Estimate:
    """The cost of a over that of b."""
    return _bootstrap([a, b], lambda cost: cost(0) / cost(1))


def geometric_mean_of_ratios(pairs: Sequence[tuple[Batches, Batches]]) -> Estimate:
    """Of the ratios of several cases."""
    sides = [side for pair in pairs for side in pair]

    def mean(cost: Callable[[int], np.ndarray]) -> np.ndarray:
        logs = [np.log(cost(2 * i) / cost(2 * i + 1)) for i in range(len(pairs))]
        return np.exp(np.mean(logs, axis=0))

    return _bootstrap(sides, mean)


def exponent(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """b of `y ~ x ** b`: least squares on logarithms, with Student's interval of the slope."""
    slope, _, _, _, error = map(float, stats.linregress(np.log(x), np.log(y)))
    if len(x) < 3:
        return Estimate(slope)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2)) * error
    return Estimate(slope, slope - half, slope + half)


def _bootstrap(sides: Sequence[Batches], statistic: Callable[[Callable[[int], np.ndarray]], np.ndarray]) -> Estimate:
    """`statistic` is given a function from a side's number to its cost, for all resamples at once."""
    ends = np.cumsum([0, *map(len, sides)])
    data = [np.asarray(batch, dtype=float) for side in sides for batch in side]

    def of_batches(*batches: np.ndarray, axis: int = -1) -> np.ndarray:
        medians = [np.median(batch, axis=axis) for batch in batches]
        return statistic(lambda side: np.mean(medians[ends[side] : ends[side + 1]], axis=0))

    value = float(of_batches(*data))
    if min(map(len, data)) < 2:
        return Estimate(value)
    options = {"n_resamples": RESAMPLES, "confidence_level": CONFIDENCE, "method": "percentile", "batch": 1000}
    result = stats.bootstrap(data, of_batches, paired=False, vectorized=True, rng=np.random.default_rng(0), **options)
    return Estimate(value, float(result.confidence_interval.low), float(result.confidence_interval.high))
