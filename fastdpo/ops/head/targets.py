"""Targets as the ops need them: checked where that is free, and safe to gather with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ... import checks
from ...packing import IGNORE_INDEX
from ..devices import is_host


@dataclass(frozen=True)
class Targets:
    """Targets [N] as columns of logits [N, V].

    Kernels read the ids. The columns are computed when PyTorch needs them in the place of a kernel.

    Attributes:
        ids: -100 where the target is ignored.
        vocabulary: V.
        ignored: bool, True where the target is -100.
        absent: bool, True where the target is in another rank's part of the vocabulary. None if the
            logits are those of the whole vocabulary.
    """

    ids: Tensor
    vocabulary: int
    ignored: Tensor
    absent: Tensor | None = None

    @staticmethod
    def of(op: str, targets: Tensor, vocabulary: int) -> Targets:
        """Targets in a vocabulary of `vocabulary` entries.

        Raises:
            ValueError: the targets are on the CPU and one of them is unknown. On other devices the
                check would synchronize with the host.
        """
        of_all = Targets(targets.contiguous(), vocabulary, targets == IGNORE_INDEX)
        if is_host(targets.device) and len(targets):
            low, high = (int(bound) for bound in of_all._not_ignored.aminmax())
            checks.require(low >= 0, op, "targets", "be -100 or ids below {}", low, vocabulary)
            checks.require(high < vocabulary, op, "targets", "be -100 or ids below {}", high, vocabulary)
        return of_all

    @cached_property
    def index(self) -> Tensor:
        """int64, the columns, 0 where a target has none."""
        return self._not_ignored.masked_fill(self._outside, 0)

    @cached_property
    def unknown(self) -> Tensor:
        """bool, True where the target is neither -100 nor in the vocabulary of all ranks."""
        return self._outside if self.absent is None else self._outside & ~self.absent

    @cached_property
    def _not_ignored(self) -> Tensor:
        return self.ids.long().masked_fill(self.ignored, 0)

    @cached_property
    def _outside(self) -> Tensor:
        return (self._not_ignored < 0) | (self._not_ignored >= self.vocabulary)

    def of_part(self, start: int, stop: int) -> Targets:
        """Targets as columns of the logits of the entries [start, stop).

        Absent and unknown targets have the first id after these entries.
        """
        absent = ((self.index < start) | (self.index >= stop)) & ~self.unknown
        ids = (self.index - start).masked_fill_(absent | self.unknown, stop - start)
        return Targets(ids.masked_fill_(self.ignored, IGNORE_INDEX), stop - start, self.ignored, absent)

    def of_rows(self, rows: slice) -> Targets:
        absent = None if self.absent is None else self.absent[rows]
        return Targets(self.ids[rows], self.vocabulary, self.ignored[rows], absent)

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
