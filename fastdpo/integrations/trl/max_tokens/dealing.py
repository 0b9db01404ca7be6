"""Pairs of a step that are dealt to the ranks by their tokens, so that no rank waits long for another one.

What all ranks have together at one position of a step stays the same, and each has as many pairs as before. Losses,
gradients and metrics, which are means over all ranks, do not change.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from accelerate.data_loader import BatchSamplerShard
from numpy.typing import NDArray
from torch.utils.data import BatchSampler

from ....data.columns import column_names, read_columns

RELIES_ON = tuple(
    f"accelerate.data_loader:BatchSamplerShard.{name}" for name in ("_iter_with_no_split", "_iter_with_split")
)
"""The functions that draw the batches of a rank (see `TrainerLine.options_rely_on`)."""


def deal(loader: Any, columns: Sequence[str], accumulation: int) -> None:
    """Has a loader of one of several ranks deal the pairs of all of them.

    Args:
        loader: as accelerate has prepared it. It stays as it is if it does not draw from a dataset with the columns.
        columns: those that hold the tokens of a pair.
        accumulation: number of batches of a step.
    """
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSamplerShard or batches.batch_size is None:
        return
    if column_names(loader.dataset).issuperset(columns):
        parts = ([sizes for _, sizes in part] for part in read_columns("patch", loader.dataset, columns))
        batches.__class__ = DealtBatches  # several objects refer to it
        vars(batches).update(tokens=np.concatenate([*parts], 1).sum(0), accumulation=accumulation)


class DealtBatches(BatchSamplerShard):
    """The batches of one rank.

    Attributes:
        tokens: of each pair, [N].
        accumulation: number of batches of a step.
    """

    tokens: NDArray[np.int64]
    accumulation: int

    def __iter__(self) -> Iterator[list[int]]:
        totals = np.zeros(self.num_processes)  # of the ranks in the step
        for position, of_ranks in enumerate(self._of_all_ranks()):
            totals *= position % self.accumulation > 0
            yield self._dealt(of_ranks, totals)[self.process_index]

    def _of_all_ranks(self) -> Iterator[tuple[list[int], ...]]:
        """The batches of all ranks at each position. They are drawn once, as by accelerate."""
        drawn = BatchSampler([*itertools.chain(*self.batch_sampler)], cast(int, self.batch_size), drop_last=False)
        ranks = []
        for rank in range(self.num_processes):
            shard = copy.copy(self)
            shard.process_index, shard.batch_sampler = rank, drawn
            ranks.append(super(DealtBatches, shard).__iter__())
        return zip(*ranks, strict=True)

    def _dealt(self, of_ranks: Sequence[list[int]], totals: NDArray[np.float64]) -> list[list[int]]:
        """The longest pair first, each to the rank with the fewest tokens of those that have room."""
        dealt: list[list[int]] = [[] for _ in of_ranks]
        for pair in sorted(itertools.chain(*of_ranks), key=lambda pair: -self.tokens[pair]):
            room = [rank for rank, pairs in enumerate(dealt) if len(pairs) < len(of_ranks[rank])]
            rank = min(room, key=totals.__getitem__)
            dealt[rank].append(pair)
            totals[rank] += self.tokens[pair]
        return dealt
