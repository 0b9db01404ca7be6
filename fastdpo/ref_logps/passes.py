"""One pass over the pairs that are not stored yet, shared between ranks, stored as it goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from .pairs import Pairs, batches
from .shards import MISSING, Shards, missing

SECONDS_BETWEEN_SHARDS = 30.0
"""What a killed process loses at most, and one batch."""

TOKENS_PER_BATCH = 16384

Score = Callable[[list[dict[str, list[int]]]], Sequence[Tensor]]
"""Rows of a data set to the log-probabilities [n] of their chosen and of their rejected completions."""


class RefLogps(NamedTuple):
    """What the reference gives the completions of N pairs, in the order of the data set.

    Attributes:
        chosen: float32 [N] on the CPU, summed log-probabilities in nats.
        rejected: float32 [N], the same.
    """

    chosen: Tensor
    rejected: Tensor


class Bounds(NamedTuple):
    """How large a batch may be.

    Attributes:
        tokens: packed ones.
        pairs: None: any number.
    """

    tokens: int = TOKENS_PER_BATCH
    pairs: int | None = None


def run(
    score: Score,
    pairs: Pairs,
    shards: Shards | None,
    bounds: Bounds,
    device: torch.device,
    description: str = "reference log-probabilities",
) -> RefLogps:
    """The values of all pairs: those that are stored, and the others from `score`, which is called by every rank.

    With torch.distributed initialised every rank must call this, and calls `score` equally often.
    """
    values = _agreed(lambda: missing(len(pairs)) if shards is None else shards.read(), device)
    if (values == MISSING).any():
        with ExitStack() as stack:
            if shards is not None:
                values = _agreed(lambda: _read_locked(shards, stack), device)
            _fill(values, score, pairs, shards, bounds, description)
            values = _merged(values, device)
            if shards is not None and _rank_and_world()[0] == 0:
                shards.merge(values)
    return RefLogps(values[:, 0].clone(), values[:, 1].clone())


def _read_locked(shards: Shards, stack: ExitStack) -> Tensor:
    if _rank_and_world()[0] == 0:
        stack.enter_context(shards.lock())
    return shards.read()


def _fill(values: Tensor, score: Score, pairs: Pairs, shards: Shards | None, bounds: Bounds, description: str) -> None:
    """Computes this rank's part of the missing values."""
    rank, world = _rank_and_world()
    sizes = pairs.sizes()
    todo = (values[:, 0] == MISSING).numpy()
    empty = (todo & ~sizes.scored).nonzero()[0]
    values[empty] = 0.0
    todo &= sizes.scored
    plan = batches(todo.nonzero()[0], sizes, *bounds)
    pending: list[int] = empty.tolist() if rank == 0 else []

    def store() -> None:
        if shards is not None and pending:
            rows = torch.tensor(pending)
            shards.write(rows, values[rows])
        pending.clear()

    total, stored = int(sizes.packed[sizes.scored].sum()), int(sizes.packed[sizes.scored & ~todo].sum())
    hidden = rank > 0 or bool(os.environ.get("TQDM_DISABLE"))
    saved = time.monotonic()
    try:
        with tqdm(total=total, initial=stored, desc=description, unit="tok", unit_scale=True, disable=hidden) as bar:
            for step in range(0, len(plan), world):
                mine = step + rank
                # A rank without a batch repeats the last: engines' forwards wait for one another.
                rows = plan[min(mine, len(plan) - 1)]
                found = torch.stack([x.float().cpu() for x in score(pairs.rows(rows))], 1)
                if mine < len(plan):
                    values[rows] = _finite(rows, found)
                    pending += rows.tolist()
                if time.monotonic() - saved >= SECONDS_BETWEEN_SHARDS:
                    store()
                    saved = time.monotonic()
                bar.update(sum(int(sizes.packed[batch].sum()) for batch in plan[step : step + world]))
    finally:
        store()


def _finite(rows: np.ndarray, found: Tensor) -> Tensor:
    if not found.isfinite().all():
        row = rows[int((~found.isfinite().all(1)).nonzero()[0])]
        raise ValueError(f"precompute: the reference's log-probabilities must be finite; got others for row {row}")
    return found


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def of_all_ranks(x: Any) -> list[Any]:
    """What each rank has given, in their order. Every rank must call this."""
    found = [x] * _rank_and_world()[1]
    if len(found) > 1:
        dist.all_gather_object(found, x)
    return found


def same_everywhere(*work: object) -> None:
    """Raises on every rank if one was given something else: they could not share it."""
    found = of_all_ranks(repr(work))
    if len(set(found)) > 1:
        rank, world = _rank_and_world()
        raise ValueError(
            "precompute: model, dataset and options must be the same on every rank; "
            f"rank {rank} of {world} got {found[rank]}, others {sorted(set(found) - {found[rank]})}"
        )


def _agreed(read: Callable[[], Tensor], device: torch.device) -> Tensor:
    """What all ranks together have read. An error of one is an error of all, so that none waits for it."""
    error = None
    values = torch.empty(0)
    try:
        values = read()
    except (ValueError, OSError) as caught:
        error = caught
    errors = of_all_ranks(None if error is None else str(error))
    if error is not None:
        raise error
    for other in filter(None, errors):
        raise ValueError(other)
    return _merged(values, device)


def _merged(values: Tensor, device: torch.device) -> Tensor:
    """What any rank has; by a collective, since ranks may not see one another's disks."""
    if _rank_and_world()[1] == 1:
        return values
    values = values.to(device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.cpu()
