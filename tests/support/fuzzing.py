"""Properties that are tested on random cases, and how many of them have run.

`FASTDPO_FUZZ` is the number of random cases of a run, all properties together. Without it, a few
thousand cases run, the same in every run.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastdpo.accuracy import floor

VARIABLE = "FASTDPO_FUZZ"
CASES = int(os.environ.get(VARIABLE, "4000"))
SEEDED = VARIABLE not in os.environ

cases: Counter[str] = Counter()
seconds: Counter[str] = Counter()

SEEDS = st.integers(0, 2**32 - 1)
FLOATS = st.sampled_from((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def fuzzed(strategy: st.SearchStrategy, share: float, failures: Sequence[NamedTuple] = ()) -> Callable:
    """Decorates a property, a function of a case that raises AssertionError where it does not hold.

    Args:
        strategy: of the cases.
        share: of all cases of the run.
        failures: cases for which the property did not hold in the past. They always run.
    """

    def decorate(prop: Callable[[Any], None]) -> Callable[..., None]:
        name = prop.__name__.removeprefix("check_")

        def counted(case):
            start = time.perf_counter()
            try:
                prop(case)
            finally:
                cases[name] += 1
                seconds[name] += time.perf_counter() - start

        counted.__name__ = name  # of which hypothesis makes the seed
        test = given(case=strategy)(counted)
        for failure in failures:
            test = example(case=failure)(test)
        return settings(
            max_examples=max(1, int(CASES * share)),
            derandomize=SEEDED,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )(test)

    return decorate


def summary() -> list[str]:
    """One line for each property, and one for all."""
    total, time_taken = sum(cases.values()), sum(seconds.values())
    lines = [f"{name}: {n} cases in {seconds[name]:.1f} s" for name, n in sorted(cases.items())]
    return [*lines, f"fuzz: {total} cases in {time_taken:.1f} s, {'seeded' if SEEDED else 'random'}"]


def assert_close(name: str, x: Tensor, eager: Tensor, exact: Tensor, noise: float, least: float = 0.0) -> None:
    """Asserts that a result is about as accurate as that of plain PyTorch.

    Unlike `accuracy.assert_as_accurate_as`, it allows for the rounding of few numbers, of
    which plain PyTorch may be exact by chance.

    Args:
        name: of the result.
        x: the result.
        eager: that of plain PyTorch in the same dtype.
        exact: that of plain PyTorch in float64.
        noise: the relative error that the rounding of scores alone may cause.
        least: the norm of the terms of which the result is a sum, if they may cancel.
    """
    assert x.shape == exact.shape, f"{name}: shape {list(x.shape)}; expected {list(exact.shape)}"
    if not x.dtype.is_floating_point:
        assert torch.equal(x, exact), name
        return
    known = exact.isfinite()  # plain PyTorch has no gradient of an entropy with a probability of 0
    errors = [torch.where(known & (y != exact), y.detach().double() - exact, 0.0).norm().item() for y in (x, eager)]
    exact = torch.where(known, exact, 0.0)
    size = max(exact.norm().item(), least, 1.0 if x.dtype == torch.float64 else 0.01)
    eager_error = errors[1] if math.isfinite(errors[1]) else 0.0
    allowed = 2 * eager_error + (floor(x.dtype) + noise) * size
    assert errors[0] <= allowed, f"{name}: error {errors[0]:.3g}; expected at most {allowed:.3g}"


def noise_of(dtype: torch.dtype, scores: float) -> float:
    """The relative error of probabilities when scores of this size are rounded to the dtype."""
    return 2 * torch.finfo(dtype).eps * (1 + scores)


class Source:
    """Random tensors of a case. The same seed gives the same tensors in the same order."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator, dtype=torch.float64) * scale).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` to `high`, both included."""
        return torch.randint(low, high + 1, shape, generator=self._generator)

    def mask(self, probability: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator) < probability
