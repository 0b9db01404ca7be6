"""Targets as the ops need them: checked where that is free, and safe to gather with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...packing import IGNORE_INDEX
from ..devices import is_host


class Targets(NamedTuple):
    """Targets [N] as columns of logits [N, V].

    Attributes:
        ids: as kernels take them.
        index: int64, the columns, 0 where a target has none.
        ignored: bool, True where the target is -100.
        unknown: bool, True where the target is neither -100 nor in the vocabulary.
        absent: bool, True where the target is in another rank's part of the vocabulary. None if the
            logits are those of the whole vocabulary.
    """

    ids: Tensor
    index: Tensor
    ignored: Tensor
    unknown: Tensor
    absent: Tensor | None = None

    @staticmethod
    def of(op: str, targets: Tensor, vocabulary: int) -> Targets:
        """Targets in a vocabulary of `vocabulary` entries.

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
        return Targets(targets.contiguous(), index.masked_fill(unknown, 0), ignored, unknown)

    def of_part(self, start: int, stop: int) -> Targets:
        """Targets as columns of the logits of the entries [start, stop).

        Kernels take absent and unknown targets as the first id after these entries.
        """
        absent = ((self.index < start) | (self.index >= stop)) & ~self.unknown
        outside, index = absent | self.unknown, self.index - start
        ids = index.masked_fill(outside, stop - start).masked_fill_(self.ignored, IGNORE_INDEX)
        return Targets(ids, index.masked_fill_(outside, 0), self.ignored, self.unknown, absent)

    def of_rows(self, rows: slice) -> Targets:
        return Targets(*(None if x is None else x[rows] for x in self))  # pyright: ignore[reportArgumentType]

    def read(self, logits: Tensor) -> Tensor:
        """The logits [N] of the targets, -inf where they are absent."""
        values = logits.gather(1, self.index[:, None])[:, 0]
        return values if self.absent is None else values.masked_fill_(self.absent, -torch.inf)

    def write_(self, logits: Tensor, values: Tensor | float) -> None:
        """Writes values [N], or one value, at the targets that are not absent."""
        column = self.index[:, None]
        if self.absent is None:
            logits.scatter_(1, column, values[:, None] if isinstance(values, Tensor) else values)
        else:
            before = logits.gather(1, column)[:, 0]
            logits.scatter_(1, column, torch.where(self.absent, before, values)[:, None])
