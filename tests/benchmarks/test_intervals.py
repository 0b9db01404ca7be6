"""Medians and ratios, and their confidence intervals, equal known values."""

import numpy as np
import pytest

from benchmarks import intervals


def test_a_median_is_the_mean_over_batches_of_each_batchs_median():
    assert intervals.median([[1, 2, 30], [5, 6, 7]]).value == (2 + 6) / 2


def test_equal_samples_have_an_interval_of_zero_width():
    assert intervals.median([[3.0] * 5]) == (3.0, 3.0, 3.0)
    assert intervals.ratio([[6.0] * 5, [2.0] * 4], [[1.0] * 5, [3.0] * 4]) == (2.0, 2.0, 2.0)


def test_the_interval_of_a_median_has_its_nominal_coverage(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 400)
    generator = np.random.default_rng(0)
    estimates = [intervals.median([generator.exponential(size=25)]) for _ in range(200)]
    covered = np.mean([low <= np.log(2) <= high for _, low, high in estimates])
    assert 0.90 <= covered <= 0.99


def test_a_single_sample_has_no_interval():
    assert intervals.ratio([[4.0]], [[2.0]]) == (2.0, None, None)


def test_a_geometric_mean_of_ratios():
    pairs = [([[8.0] * 3], [[2.0] * 3]), ([[1.0] * 3], [[1.0] * 3])]
    assert intervals.geometric_mean_of_ratios(pairs) == pytest.approx((2.0, 2.0, 2.0))
