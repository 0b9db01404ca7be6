"""A batch sampler whose batches have a number of tokens instead of a number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from .. import checks
from ..lengths import PairLengths
from .cost import CostModel
from .planning import StepPlanner

Order = Callable[[int], Sequence[int] | np.ndarray]
"""Returns the indices of the pairs of an epoch, given the number of the epoch."""


def random_order(pairs: int, seed: int = 0) -> Order:
    """A permutation of this many pairs that depends on the seed and on the epoch alone."""
    return lambda epoch: np.random.default_rng((seed, epoch)).permutation(pairs)


class MicroBatch(NamedTuple):
    """A micro-batch of one rank.

    Attributes:
        pairs: their indices in the dataset.
        share: the factor of its mean loss. The loss of a step, as an average over the ranks of the
            sums over their micro-batches, then is the mean over the pairs of all ranks.
    """

    pairs: list[int]
    share: float


def shared_among_ranks(cut: list[list[list[int]]]) -> list[list[MicroBatch]]:
    """The micro-batches of each rank in a step, given the result of `StepPlanner.cut`."""
    total = sum(len(pairs) for of_ranks in cut for pairs in of_ranks)
    ranks = len(cut[0])
    return [
        [MicroBatch(of_ranks[rank], len(of_ranks[rank]) * ranks / total) for of_ranks in cut] for rank in range(ranks)
    ]


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of up to `max_tokens` distinct tokens, for a `torch.utils.data.DataLoader`.

    The pairs of each optimizer step are those that a sampler of fixed batches would draw. They are
    cut into micro-batches by `StepPlanner`, whose number varies from step to step and is the same
    on all ranks. `steps` has the micro-batches of each step, with the factors of their losses.

    As a `batch_sampler`, it yields the indices of one micro-batch after another. Without `rank`,
    those of all ranks take turns, so that accelerate's `BatchSamplerShard` gives each rank its own.

    Args:
        lengths: of the pairs of the dataset.
        max_tokens: of a micro-batch on one rank.
        pairs_per_step: pairs of an optimizer step on all ranks, a multiple of the number of ranks.
        ranks: number of ranks.
        rank: yield the micro-batches of this rank only.
        order: the order of the pairs in an epoch. Default: `random_order` with the seed.
        seed: of the default order.
        drop_last: leave out the last step if it has fewer pairs. Otherwise it is filled up to a
            multiple of the number of ranks with the first pairs of the epoch.
        cost, share_prompts: as in `StepPlanner`.

    Raises:
        TypeError, ValueError: an argument is malformed, or a pair has more than `max_tokens` tokens.
    """

    def __init__(
        self,
        lengths: PairLengths,
        max_tokens: int,
        pairs_per_step: int,
        *,
        ranks: int = 1,
        rank: int | None = None,
        order: Order | None = None,
        seed: int = 0,
        drop_last: bool = False,
        cost: CostModel | None = None,
        share_prompts: bool = True,
    ):
        op = "TokenBudgetSampler"
        self._planner = StepPlanner(lengths, max_tokens, ranks=ranks, cost=cost, share_prompts=share_prompts, op=op)
        rule = f"be a positive multiple of the number of ranks ({ranks})"
        checks.require_integer(op, "pairs_per_step", pairs_per_step, rule)
        checks.require(pairs_per_step > 0 and pairs_per_step % ranks == 0, op, "pairs_per_step", rule, pairs_per_step)
        if rank is not None:
            rule = f"be None or an integer from 0 to {ranks - 1}"
            checks.require_integer(op, "rank", rank, rule)
            checks.require(0 <= rank < ranks, op, "rank", rule, rank)
        checks.require_integer(op, "seed", seed, "be an integer that is not negative")
        checks.require(seed >= 0, op, "seed", "be an integer that is not negative", seed)
        checks.require_flags(op, drop_last=drop_last)
        self._order = order or random_order(len(lengths), seed)
        self._pairs_per_step, self._drop_last = pairs_per_step, drop_last
        self._rank = rank
        self._epoch = 0
        self._planned: tuple[int, list[list[list[MicroBatch]]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Selects the epoch, from which the order of the pairs follows."""
        self._epoch = epoch

    def steps(self, rank: int | None = None) -> list[list[MicroBatch]]:
        """The micro-batches of each step of the epoch on one rank. Default: the sampler's rank, or 0."""
        rank = rank if rank is not None else self._rank or 0
        return [of_ranks[rank] for of_ranks in self._plan()]

    def __iter__(self) -> Iterator[list[int]]:
        for of_ranks in self._plan():
            mine = of_ranks if self._rank is None else [of_ranks[self._rank]]
            for micro_batches in zip(*mine, strict=True):
                yield from (micro_batch.pairs for micro_batch in micro_batches)

    def __len__(self) -> int:
        """The number of micro-batches of the epoch."""
        copies = self._planner.ranks if self._rank is None else 1
        return copies * sum(len(of_ranks[0]) for of_ranks in self._plan())

    def _plan(self) -> list[list[list[MicroBatch]]]:
        """The micro-batches of each step and rank."""
        if self._planned is None or self._planned[0] != self._epoch:
            order = np.asarray(self._order(self._epoch), dtype=np.int64)
            cuts = [self._planner.cut(pairs) for pairs in self._pairs_of_steps(order)]
            self._planned = self._epoch, [shared_among_ranks(cut) for cut in cuts]
        return self._planned[1]

    def _pairs_of_steps(self, order: np.ndarray) -> Iterator[np.ndarray]:
        for start in range(0, len(order), self._pairs_per_step):
            pairs = order[start : start + self._pairs_per_step]
            if len(pairs) < self._pairs_per_step and self._drop_last:
                return
            yield np.concatenate([pairs, np.resize(order, -len(pairs) % self._planner.ranks)])
