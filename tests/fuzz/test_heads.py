"""Log-probabilities of random logits and heads, against their definitions in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from fastdpo import ops
from fastdpo.ops import definitions
from fastdpo.ops.devices import accumulation_dtype
from fastdpo.ops.head.results import STATISTICS
from tests.support.fuzzing import FLOATS, SEEDS, Source, assert_close, fuzzed, noise_of

NUMBERS = tuple(name for name in STATISTICS if name != "is_top1")


class Head(NamedTuple):
    """Logits, or hidden states and a head.

    Attributes:
        n, v, d: sizes. Without hidden states, d is not used.
        scored: the share of targets that are not -100.
        scale: the size of logits.
        layout: "rows", "columns" (a transposed matrix) or "steps" (every second column).
        statistics: those that are asked for.
        trained: the arguments of a head that need a gradient.
        kept: the share of gradient tiles that fit in `memory_budget`.
        sequences: how many sequences the tokens belong to.
    """

    seed: int
    dtype: torch.dtype
    n: int
    v: int
    d: int
    scored: float
    scale: float
    softcap: float | None
    logit_scale: float
    temperature: float
    layout: str
    statistics: tuple[str, ...]
    trained: tuple[str, ...]
    has_bias: bool
    kept: float
    sequences: int

    @property
    def transform(self) -> dict:
        return dict(softcap=self.softcap, logit_scale=self.logit_scale, temperature=self.temperature)

    @property
    def largest_logit(self) -> float:
        """About the largest logit, before its transform."""
        return 6 * (self.scale + self.has_bias)

    @property
    def noise(self) -> tuple[float, float]:
        """Of probabilities, and of the mean of logits."""
        return noise_of(self.dtype, self.largest_logit), noise_of(self.dtype, 0)


HEADS = st.builds(
    Head,
    seed=SEEDS,
    dtype=FLOATS,
    n=st.integers(0, 9),
    v=st.one_of(st.integers(1, 20), st.sampled_from([64, 127, 300])),
    d=st.integers(1, 12),
    scored=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    scale=st.sampled_from([0.01, 1.0, 5.0, 30.0]),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    logit_scale=st.sampled_from([1.0, 0.25, -1.5, 0.0]),
    temperature=st.sampled_from([1.0, 0.7, 3.0]),
    layout=st.sampled_from(["rows", "columns", "steps"]),
    statistics=st.lists(st.sampled_from(NUMBERS), unique=True).map(tuple),
    trained=st.lists(st.sampled_from(["hidden", "weight", "bias"]), unique=True).map(tuple),
    has_bias=st.booleans(),
    kept=st.sampled_from([0.0, 0.5, 1.0]),
    sequences=st.integers(1, 5),
)


def strided(x: Tensor, layout: str) -> Tensor:
    """The same values in another layout of memory."""
    if layout == "columns":
        return x.t().contiguous().t()
    if layout == "steps":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    return x


def targets_of(case: Head, source: Source) -> Tensor:
    ids = source.integers(0, case.v - 1, case.n)
    return torch.where(source.mask(case.scored, case.n), ids, -100)


def results(
    layout: str, op: Callable, leaves: dict[str, Tensor], trained: tuple[str, ...], weights: dict, **options
) -> dict[str, Tensor]:
    """The results of an op by name, and the gradients of a weighted sum of logps and entropy."""
    inputs = {name: x.detach().clone().requires_grad_(name in trained) for name, x in leaves.items()}
    of_tokens = {name: strided(x, layout) for name, x in inputs.items() if name in ("logits", "hidden")}
    found = {name: x for name, x in op(**inputs | of_tokens, **options)._asdict().items() if x is not None}
    loss = sum((weights[name].to(x.dtype) * x).sum() for name, x in found.items() if name in weights)
    if any(x.requires_grad for x in inputs.values()):
        loss.backward()
    gradients = {f"gradient of {name}": inputs[name].grad for name in trained}
    return {**found, **gradients}


def assert_accurate(case: Head, op: str, leaves, trained, weights, noise, linear, **options) -> None:
    """Asserts that results and gradients of an op are as accurate as those of plain PyTorch.

    `noise` is what the rounding of logits does to probabilities, and `linear` what it does to the
    mean of logits, whose terms may cancel.
    """
    memory = {name: options.pop(name) for name in ("memory_budget", "inplace_backward") if name in options}
    wide = {name: x.double() for name, x in leaves.items()}
    actual = results(case.layout, getattr(ops, op), leaves, trained, weights, **options, **memory)
    definition = getattr(definitions, op)
    eager = results(case.layout, definition, leaves, trained, weights, **options)
    exact = results(case.layout, definition, wide, trained, weights, **options)
    assert actual.keys() == exact.keys()
    for name, x in actual.items():
        of_terms = case.largest_logit * abs(case.logit_scale) / case.temperature * case.n**0.5
        budget = (linear, of_terms) if name == "mean_logits" else (noise, 0.0)
        assert_close(name, x, eager[name], exact[name], *budget)


def check_logits(case: Head) -> None:
    source = Source(case.seed)
    logits = source.normal(case.n, case.v, dtype=case.dtype, scale=case.scale)
    targets = targets_of(case, source)
    weights = {name: source.normal(case.n) for name in ("logps", "entropy")}
    options = dict(case.transform, targets=targets, outputs=case.statistics)
    noise, linear = (noise_of(accumulation_dtype(case.dtype), scores) for scores in (6 * case.scale, 0))
    assert_accurate(case, "token_logps", {"logits": logits}, ("logits",), weights, noise, linear, **options)


def head_of(case: Head, source: Source) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    leaves = {
        "hidden": source.normal(case.n, case.d, dtype=case.dtype),
        "weight": source.normal(case.v, case.d, dtype=case.dtype, scale=case.scale * case.d**-0.5),
    }
    if case.has_bias:
        leaves["bias"] = source.normal(case.v, dtype=case.dtype)
    return leaves, tuple(name for name in case.trained if name in leaves)


def budget_of(case: Head) -> int:
    return int(case.kept * case.n * case.v * case.dtype.itemsize)


def check_head(case: Head) -> None:
    source = Source(case.seed)
    leaves, trained = head_of(case, source)
    targets = targets_of(case, source)
    weights = {name: source.normal(case.n) for name in ("logps", "entropy")}
    options = dict(case.transform, targets=targets, outputs=case.statistics, memory_budget=budget_of(case))
    assert_accurate(case, "linear_logps", leaves, trained, weights, *case.noise, **options)


def bounds_of(case: Head, source: Source, sequences: int) -> Tensor:
    """[sequences + 1] bounds of the tokens of sequences, some of which are empty."""
    inner = source.integers(0, case.n, sequences - 1).sort().values
    return torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), case.n)])


def check_sequences(case: Head) -> None:
    source = Source(case.seed)
    leaves, trained = head_of(case, source)
    targets = targets_of(case, source)
    bounds = bounds_of(case, source, case.sequences)
    weights = {"logps": source.normal(case.sequences)}
    options = dict(case.transform, targets=targets, cu_seqlens=bounds, memory_budget=budget_of(case))
    assert_accurate(case, "linear_sequence_logps", leaves, trained, weights, *case.noise, **options)


CONFIDENT = Head(0, torch.float32, 3, 5, 4, 1.0, 30.0, None, 1.0, 1.0, "rows", NUMBERS, (), False, 0.0, 1)
NO_TOKENS = CONFIDENT._replace(n=0, trained=("hidden", "weight"), sequences=3)
NOTHING_SCORED = CONFIDENT._replace(scored=0.0, trained=("hidden", "weight"), kept=0.5)
ONE_ENTRY = CONFIDENT._replace(v=1, dtype=torch.bfloat16, layout="columns")
FAILURES = (CONFIDENT, NO_TOKENS, NOTHING_SCORED, ONE_ENTRY)

test_token_logps = fuzzed(HEADS, 0.2, FAILURES)(check_logits)
test_linear_logps = fuzzed(HEADS, 0.2, FAILURES)(check_head)
test_linear_sequence_logps = fuzzed(HEADS, 0.05, FAILURES)(check_sequences)
