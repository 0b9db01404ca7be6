"""A training data loader of transformers' Trainer whose optimizer steps are cut by a budget of tokens.

The loader has as many items as the Trainer's own, `gradient_accumulation_steps` of them for each
optimizer step, so that the Trainer counts, saves and resumes as before. Each item is a list of
micro-batches, `MicroBatches`. Together, the items of a step hold the pairs that the Trainer's own
loader would have given to all ranks in this step. If a step has fewer micro-batches than items, its
first items are empty.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler
from accelerate.utils import broadcast_object_list
from torch.utils.data import Dataset, SequentialSampler

from ....batching import MicroBatch, StepPlanner
from ....batching.sampler import shared_among_ranks
from .learned_tokens import LearnedTokens
from .loaders import batches_of_all_ranks

_LOADER_OPTIONS = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)

Steps = list[list[list[int]]]
"""The batches of all ranks in each optimizer step, as the Trainer's loader draws them."""


class MicroBatches(list[tuple[Any, float]]):
    """One item of the loader: what the Trainer's collator makes of the pairs of each micro-batch, and its share, as in
    `MicroBatch`.
    """


def with_token_budget(
    loader: DataLoaderShard,
    planner: StepPlanner,
    accumulation: int,
    rank: int,
    learned: LearnedTokens | None = None,
) -> DataLoaderShard:
    """A loader of `MicroBatches` in the place of a prepared loader.

    Args:
        loader: as accelerate has prepared it.
        planner: cuts the steps.
        accumulation: `gradient_accumulation_steps` of the Trainer.
        rank: of this process among those that load different data.
        learned: the tokens of each step. Default: those of the planner.
    """
    return DataLoaderShard(
        _MicroBatchDataset(loader.dataset),
        device=loader.device,
        rng_types=loader.rng_types,
        synchronized_generator=loader.synchronized_generator,
        iteration=loader.iteration,
        _drop_last=loader._drop_last,
        _non_blocking=loader._non_blocking,
        batch_sampler=StepSampler(loader.batch_sampler, planner, accumulation, rank, learned),
        collate_fn=functools.partial(_collated, loader.collate_fn),
        **{name: getattr(loader, name) for name in _LOADER_OPTIONS},
    )


class _MicroBatchDataset(Dataset):
    """A dataset whose indices are micro-batches, and whose items are their pairs and shares."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, micro_batch: MicroBatch) -> tuple[list[Any], float]:
        pairs, share = micro_batch
        read = getattr(self._dataset, "__getitems__", None)  # as `DataLoader` does
        return [self._dataset[i] for i in pairs] if read is None else read(pairs), share


def _collated(collate: Callable[[list[Any]], Any], micro_batches: list[tuple[list[Any], float]]) -> MicroBatches:
    return MicroBatches((collate(pairs), share) for pairs, share in micro_batches)


class _Drawn:
    """Batches that a batch sampler has drawn. Yields copies, since accelerate extends them in place."""

    def __init__(self, batches: list[list[int]], batch_size: int | None):
        self._batches, self.batch_size = batches, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class StepSampler:
    """The batch sampler of the loader. Yields the micro-batches of each item.

    Args:
        stock: the batch sampler of the prepared loader: of this rank if there are several.
    """

    def __init__(
        self,
        stock: Any,
        planner: StepPlanner,
        accumulation: int,
        rank: int,
        learned: LearnedTokens | None,
    ):
        self.stock, self.planner, self._accumulation, self._rank = stock, planner, accumulation, rank
        self._learned = learned

    @property
    def _of_all_ranks(self) -> Any:
        return batches_of_all_ranks(self.stock)

    @property
    def sampler(self) -> Any:
        """The sampler of pairs. accelerate sets its epoch."""
        return getattr(self._of_all_ranks, "sampler", None)

    def set_epoch(self, epoch: int) -> None:
        for of_pairs in (self._of_all_ranks, self.sampler):
            if hasattr(of_pairs, "set_epoch"):
                of_pairs.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.stock)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        steps = self._drawn_steps()
        first = 0 if self._learned is None else self._learned.step // len(steps) * len(steps)
        for step, batches in enumerate(steps, first):
            cut = self._cut(step, batches)
            mine = shared_among_ranks(cut)[self._rank]
            yield from _items(mine, len(batches) // self.planner.ranks)

    def _cut(self, step: int, batches: list[list[int]]) -> list[list[list[int]]]:
        pairs = [pair for batch in batches for pair in batch]
        if self._learned is None:
            return self.planner.cut(pairs)
        return self.planner.cut(pairs, self._learned.of_step(step, max(map(self.planner.tokens_of, batches))))

    def _drawn_steps(self) -> Steps:
        """The steps of an epoch. The sampler of pairs is run once, as in the Trainer's loader."""
        drawn: list[list[int]] = list(map(list, self._of_all_ranks))
        of_pairs = getattr(self.sampler, "stock", self.sampler)  # one that groups prompts has a stock one
        if self.planner.ranks > 1 and not isinstance(of_pairs, SeedableRandomSampler | SequentialSampler):
            drawn = broadcast_object_list([drawn])[0]  # ranks may have drawn from different random states
        of_ranks = [drawn]
        if isinstance(self.stock, BatchSamplerShard):
            of_ranks = [list(map(list, self._shard(drawn, rank))) for rank in range(self.planner.ranks)]
        size = self._accumulation
        starts = range(0, len(of_ranks[0]), size)
        return [[batch for batches in of_ranks for batch in batches[start : start + size]] for start in starts]

    def _shard(self, drawn: list[list[int]], rank: int) -> Any:
        shard = copy.copy(self.stock)
        shard.batch_sampler = _Drawn(drawn, getattr(self._of_all_ranks, "batch_size", None))
        shard.process_index = rank
        return shard


def _items(micro_batches: list[MicroBatch], n_items: int) -> Iterator[list[MicroBatch]]:
    """Spreads the micro-batches of a step over its items. The last item has at least one."""
    n, ends = len(micro_batches), []
    for item in range(n_items):
        ends.append(max(0, n - n_items + item + 1) if n <= n_items else n * (item + 1) // n_items)
    for start, end in zip([0, *ends], ends, strict=False):
        yield micro_batches[start:end]
