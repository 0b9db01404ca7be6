"""Targets as the ops need them: checked where that is free, and safe to gather with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .. import checks
from ..packing import IGNORE_INDEX
from .devices import is_host


class SplitTargets(NamedTuple):
    """Targets [N], and which of them score nothing.

    Attributes:
        ignored: bool [N], True where the target is -100.
        unknown: bool [N], True where the target is neither -100 nor in the vocabulary.
        index: int64 [N], ids in the vocabulary, 0 where the target is ignored or unknown.
    """

    ignored: Tensor
    unknown: Tensor
    index: Tensor


def split_targets(op: str, targets: Tensor, vocabulary: int) -> SplitTargets:
    """Splits targets [N] for a vocabulary of `vocabulary` entries.

    Raises:
        ValueError: the targets are on the CPU and one of them is unknown. On other devices the
            check would synchronize with the host.
    """
    ignored = targets == IGNORE_INDEX
    index = targets.long().masked_fill(ignored, 0)
    if is_host(index.device) and len(index):
        low, high = (int(bound) for bound in index.aminmax())
        checks.require(low >= 0, op, "targets", "be -100 or ids below {}", low, vocabulary)
        checks.require(high < vocabulary, op, "targets", "be -100 or ids below {}", high, vocabulary)
    unknown = (index < 0) | (index >= vocabulary)
    return SplitTargets(ignored, unknown, index.masked_fill(unknown, 0))
