"""Targets as the ops need them: checked where that is free, and safe to gather with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...packing import IGNORE_INDEX
from ..devices import is_host


class VocabularyPart(NamedTuple):
    """The consecutive vocabulary entries [start, stop) that one rank has, out of `vocabulary` entries."""

    start: int
    stop: int
    vocabulary: int


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


class TileTargets(NamedTuple):
    """Targets [n] as columns of a tile [n, V].

    Attributes:
        index: int64, 0 where the target is absent.
        absent: bool, True where the target is in another rank's part of the vocabulary. None if the
            tile has the whole vocabulary.
    """

    index: Tensor
    absent: Tensor | None = None

    def of_rows(self, rows: slice) -> TileTargets:
        return TileTargets(self.index[rows], None if self.absent is None else self.absent[rows])

    def read(self, tile: Tensor) -> Tensor:
        """The tile's values [n] at the targets, -inf where they are absent."""
        values = tile.gather(1, self.index[:, None])[:, 0]
        return values if self.absent is None else values.masked_fill_(self.absent, -torch.inf)

    def write_(self, tile: Tensor, values: Tensor | float) -> None:
        """Writes values [n], or one value, at the targets that are not absent."""
        column = self.index[:, None]
        if self.absent is None:
            tile.scatter_(1, column, values[:, None] if isinstance(values, Tensor) else values)
        else:
            before = tile.gather(1, column)[:, 0]
            tile.scatter_(1, column, torch.where(self.absent, before, values)[:, None])


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


def targets_of_part(split: SplitTargets, part: VocabularyPart) -> tuple[Tensor, TileTargets]:
    """Targets [N] in a part of the vocabulary: as kernels take them, and as columns of its tiles.

    Kernels take absent and unknown targets as the first id after the part's entries.
    """
    absent = ((split.index < part.start) | (split.index >= part.stop)) & ~split.unknown
    outside, index = absent | split.unknown, split.index - part.start
    ids = index.masked_fill(outside, part.stop - part.start).masked_fill_(split.ignored, IGNORE_INDEX)
    return ids, TileTargets(index.masked_fill_(outside, 0), absent)
