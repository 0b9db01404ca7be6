"""The batches of a training that are known before they are drawn, and the largest of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, SequentialSampler

from ..batching import MicroBatch
from .budgeted_loader import StepSampler, rows_of


class Replay(NamedTuple):
    """Copies of samplers, which draw what the originals draw.

    Attributes:
        batches: yields the items of an epoch for one rank.
        pairs: the sampler of pairs behind it.
    """

    batches: Any
    pairs: Any


def drawn_batches(loader: DataLoaderShard, accumulation: int, max_steps: int) -> Iterator[list[int]] | None:
    """The batches of this rank in a training from its first step, as indices of pairs.

    Neither the samplers nor any random state change. Returns None if the order of the pairs depends
    on more than a seed.

    Args:
        loader: as accelerate has prepared it, or with a token budget.
        accumulation: batches of an optimizer step.
        max_steps: optimizer steps of the training.
    """
    replay = _replay(loader.batch_sampler)
    return None if replay is None else _batches(replay, accumulation, max_steps)


def largest_pairs(sizes: np.ndarray, n_pairs: int, max_tokens: int | None = None) -> list[int]:
    """The largest pairs that can be in one batch.

    Args:
        sizes: tokens of all N pairs, int64 [N].
        n_pairs: how many pairs a batch has, at most.
        max_tokens: of a batch. Pairs that fit are taken, the largest first.
    """
    order = np.argsort(-sizes, kind="stable")
    if max_tokens is None:
        return order[:n_pairs].tolist()
    descending, pairs, place = -sizes[order], [], 0
    while len(pairs) < n_pairs:
        place = max(place, int(np.searchsorted(descending, -max_tokens)))
        if place == len(order):
            break
        pairs.append(int(order[place]))
        max_tokens -= int(sizes[order[place]])
        place += 1
    return pairs


def collated(loader: DataLoaderShard, pairs: list[int]) -> Any:
    """A batch of these pairs, as the loader would make it."""
    if isinstance(loader.batch_sampler, StepSampler):
        item: Any = loader.dataset[MicroBatch(pairs, 1.0)]
        [micro_batch] = loader.collate_fn([item])
        return micro_batch.inputs
    return loader.collate_fn(rows_of(loader.dataset, pairs))


def _replay(sampler: Any) -> Replay | None:
    if isinstance(sampler, StepSampler):
        return _over(_replay(sampler.stock), sampler.over)
    if type(sampler) is BatchSamplerShard:
        shard = copy.copy(sampler)

        def of_rank(batches: Any) -> Any:
            shard.batch_sampler = batches
            return shard

        return _over(_replay(sampler.batch_sampler), of_rank)
    if type(sampler) is not BatchSampler or type(sampler.sampler) not in (SeedableRandomSampler, SequentialSampler):
        return None
    batches, pairs = copy.copy(sampler), copy.copy(sampler.sampler)
    batches.sampler = pairs
    if isinstance(pairs, SeedableRandomSampler):
        vars(pairs)["generator"] = None  # it then creates its own, which it seeds in each epoch
    return Replay(batches, pairs)


def _over(replay: Replay | None, wrap: Callable[[Any], Any]) -> Replay | None:
    return None if replay is None else Replay(wrap(replay.batches), replay.pairs)


def _batches(replay: Replay, accumulation: int, max_steps: int) -> Iterator[list[int]]:
    is_cut = isinstance(replay.batches, StepSampler)
    steps_per_epoch = max(1, -(-len(replay.batches) // accumulation))
    for epoch, done in enumerate(range(0, max_steps, steps_per_epoch)):
        if hasattr(replay.pairs, "set_epoch"):
            replay.pairs.set_epoch(epoch)
        for item in islice(replay.batches, (max_steps - done) * accumulation):
            if is_cut:
                yield from (micro_batch.pairs for micro_batch in item)
            else:
                yield item
