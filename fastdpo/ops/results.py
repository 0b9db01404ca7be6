"""What the ops return when it is more than one tensor. A statistic that was not asked for is None."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

STATISTICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
"""What can be asked for beside the log-probability, in the order in which the kernels return it."""


class TokenLogps(NamedTuple):
    """Per scored token; zero where the target is ignored. float32 (float64 for float64 inputs) unless said.

    Attributes:
        logps: log-probability of the target, in nats. Differentiable.
        entropy: entropy of the predicted distribution, in nats. Differentiable.
        mean_logits: mean of the transformed logits over the vocabulary. No gradient.
        is_top1: bool; whether the target is the first among the most likely tokens.
        log_sum_sq_probs: `log sum_v p_v^2`, what WPO weights with (arXiv 2406.11827, eq. 2). No gradient.
    """

    logps: Tensor
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


class SequenceLogps(NamedTuple):
    """Per sequence.

    Attributes:
        logps: sum of the log-probabilities of the sequence's targets, in nats. Differentiable.
        lengths: int64; how many targets that sum has.
    """

    logps: Tensor
    lengths: Tensor
