"""Results of the ops that return more than one tensor.

A statistic that was not requested is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ..devices import accumulation_dtype

STATISTICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
"""The statistics that can be requested, in the order in which custom ops and kernels return them.
"""
LOGGED_STATISTICS = ("entropy", "mean_logits", "is_top1")
"""Those that TRL logs."""


class TokenLogps(NamedTuple):
    """Log-probabilities and statistics per scored token; zero where the target is ignored.

    float32 (float64 for float64 inputs) unless stated otherwise.

    Attributes:
        logps: log-probability of the target, in nats. Differentiable.
        entropy: entropy of the predicted distribution, in nats. Differentiable.
        mean_logits: mean of the transformed logits over the vocabulary. No gradient.
        is_top1: bool, whether the target is the first of the most likely tokens.
        log_sum_sq_probs: `log sum_v p_v^2`, from which WPO computes its weights (arXiv 2406.11827,
            eq. 2). No gradient.
    """

    logps: Tensor
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


class SequenceLogps(NamedTuple):
    """Log-probabilities per sequence.

    Attributes:
        logps: sum of the log-probabilities of the sequence's targets, in nats. Differentiable.
        lengths: int64, the number of targets in that sum.
    """

    logps: Tensor
    lengths: Tensor


def requested_statistics(op: str, outputs: Sequence[str]) -> str:
    """The statistics among `outputs`, comma-separated in the order of `STATISTICS`.

    Custom ops take them in this form.
    """
    known = ("logps", *STATISTICS)
    names = outputs if isinstance(outputs, str) or not hasattr(outputs, "__iter__") else tuple(outputs)
    valid = isinstance(names, tuple) and all(name in known for name in names)
    checks.require(valid, op, "outputs", f"be a sequence of names from {known}", names)
    return ",".join(name for name in STATISTICS if name in names)


def statistic_names(statistics: str) -> list[str]:
    """The names in a comma-separated string, the form in which custom ops take statistics."""
    return [name for name in statistics.split(",") if name]


def empty_results(rows: Tensor, statistics: str) -> list[Tensor]:
    """Uninitialized logps, shift, others, total and statistics, each [N], for `rows` [N, ...]."""
    dtype = accumulation_dtype(rows.dtype)
    dtypes = [dtype] * 4 + [torch.bool if name == "is_top1" else dtype for name in statistic_names(statistics)]
    return [torch.empty(rows.shape[0], dtype=dtype, device=rows.device) for dtype in dtypes]


def named_results(logps: Tensor, extra: Sequence[Tensor], statistics: str, shape: Sequence[int]) -> TokenLogps:
    """`TokenLogps` of the given shape from log-probabilities [N] and statistics [N] in order."""
    values = zip(statistic_names(statistics), extra, strict=True)
    return TokenLogps(logps=logps.reshape(shape), **{name: value.reshape(shape) for name, value in values})
