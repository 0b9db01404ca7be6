"""The transform of logits, targets and results of the ops that score tokens.

A statistic that was not requested is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...packing import IGNORE_INDEX
from ..devices import accumulation_dtype, is_host

STATISTICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
"""The statistics that can be requested, in the order in which custom ops and kernels return them.
"""
LOGGED_STATISTICS = ("entropy", "mean_logits", "is_top1")
"""Those that TRL logs."""


class Transform(NamedTuple):
    """The transform `z = softcap * tanh(logit_scale * x / softcap) / temperature` of raw logits x."""

    softcap: float | None
    logit_scale: float
    temperature: float

    def apply_(self, x: Tensor) -> Tensor:
        """Transforms x in place, in its dtype."""
        if self.logit_scale != 1.0:
            x.mul_(self.logit_scale)
        if self.softcap is not None:
            x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x if self.temperature == 1.0 else x.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | None:
        """`d z / d x` divided by the constant `gain`, computed from z; None where it is 1."""
        return None if self.softcap is None else 1 - (z * (self.temperature / self.softcap)).square()

    @property
    def gain(self) -> float:
        return self.logit_scale / self.temperature

    @property
    def kind(self) -> str:
        """What kernels are compiled for: one of `trials.TRANSFORMS`."""
        if self.softcap is not None:
            return "capped"
        return "plain" if self.gain == 1.0 else "scaled"


@dataclass(frozen=True)
class Targets:
    """Targets [N] as columns of logits [N, V].

    Kernels read the ids. The columns are computed when PyTorch needs them in the place of a kernel.

    Attributes:
        ids: -100 where the target is ignored.
        vocabulary: V.
        ignored: bool, True where the target is -100.
    """

    ids: Tensor
    vocabulary: int
    ignored: Tensor

    @staticmethod
    def of(op: str, targets: Tensor, vocabulary: int) -> Targets:
        """Targets in a vocabulary of `vocabulary` entries.

        Raises:
            ValueError: the targets are on the CPU and one of them is unknown. On other devices the
                check would synchronize with the host.
        """
        found = Targets(targets.contiguous(), vocabulary, targets == IGNORE_INDEX)
        if is_host(targets.device) and len(targets):
            low, high = (int(bound) for bound in found._not_ignored.aminmax())
            checks.require(low >= 0, op, "targets", "be -100 or ids below {}", low, vocabulary)
            checks.require(high < vocabulary, op, "targets", "be -100 or ids below {}", high, vocabulary)
        return found

    @cached_property
    def index(self) -> Tensor:
        """int64, the columns, 0 where a target has none."""
        return self._not_ignored.masked_fill(self.unknown, 0)

    @cached_property
    def unknown(self) -> Tensor:
        """bool, True where the target is neither -100 nor in the vocabulary."""
        return (self._not_ignored < 0) | (self._not_ignored >= self.vocabulary)

    @cached_property
    def _not_ignored(self) -> Tensor:
        return self.ids.long().masked_fill(self.ignored, 0)

    def of_rows(self, rows: slice) -> Targets:
        return Targets(self.ids[rows], self.vocabulary, self.ignored[rows])

    def read(self, logits: Tensor) -> Tensor:
        """The logits [N] of the targets."""
        return logits.gather(1, self.index[:, None])[:, 0]

    def write_(self, logits: Tensor, values: Tensor | float) -> None:
        """Writes values [N], or one value, at the targets."""
        logits.scatter_(1, self.index[:, None], values[:, None] if isinstance(values, Tensor) else values)


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
