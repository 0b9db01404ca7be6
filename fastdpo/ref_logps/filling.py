"""One pass over the pairs that are not stored yet, shared between
ranks, which stores values as it goes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .. import atomic_files
from ..distributed import largest_of_ranks, raising_on_all, rank_and_world_size
from ..logs import strict, warn
from ..reasons import Reason
from .keys import Bounds
from .pairs import Pairs, batches
from .ranks import cache_disabled
from .shards import MISSING, Shards, missing

SECONDS_BETWEEN_SHARDS = 30.0
"""A killed process loses at most the values of this many seconds and of one batch."""

TOKENS_PER_BATCH = 16384

Score = Callable[[list[dict[str, list[int]]]], Sequence[Tensor]]
"""Returns the log-probabilities [n] of the chosen and of the rejected
completions of n rows of a dataset.
"""


class RefLogps(NamedTuple):
    """Reference log-probabilities of N pairs, in the order of the dataset.

    Attributes:
        chosen: float32 [N] on the CPU, summed log-probabilities of the chosen completions in nats.
        rejected: float32 [N] on the CPU, those of the rejected completions.
    """

    chosen: Tensor
    rejected: Tensor


def run(
    score: Score,
    pairs: Pairs,
    shards: Shards | None,
    bounds: Bounds,
    device: torch.device,
    description: str = "reference log-probabilities",
) -> RefLogps:
    """Returns the stored values of all pairs, and computes those that are missing by `score`.

    With torch.distributed initialised, every rank must call this, and each rank calls `score`
    equally often.
    """
    stored = missing(len(pairs)) if shards is None else raising_on_all(shards.read, ValueError, OSError)
    values = largest_of_ranks(stored, device)
    if shards is not None:
        atomic_files.remove_leftovers(shards.directory)  # by each rank, which may have a disk of its own
    if (values == MISSING).any():
        if shards is not None and cache_disabled(shards.unusable_reason()):
            shards = None
        failure = _fill(values, score, pairs, shards, bounds, description)
        values = largest_of_ranks(values, device)
        if shards is not None and failure is None and rank_and_world_size()[0] == 0:
            failure = _failure(partial(shards.merge, values))
        if strict():
            cache_disabled(failure)
    return RefLogps(*(x.clone() for x in values.unbind(1)))


def _fill(
    values: Tensor, score: Score, pairs: Pairs, shards: Shards | None, bounds: Bounds, description: str
) -> Reason | None:
    """Computes this rank's part of the missing values. Returns why
    they could not be stored, or None.
    """
    rank, world = rank_and_world_size()
    packed = pairs.lengths.packed()  # 0 where nothing is scored
    todo = (values[:, 0] == MISSING).numpy()
    empty = (todo & (packed == 0)).nonzero()[0]
    values[empty] = 0.0
    todo &= packed > 0
    todo_batches = batches(todo.nonzero()[0], pairs.lengths, *bounds)
    pending: list[int] = empty.tolist() if rank == 0 else []
    failure: Reason | None = None

    def store() -> None:
        nonlocal failure
        if shards is not None and pending and failure is None:
            rows = torch.tensor(pending, device="cpu")
            failure = _failure(partial(shards.write, rows, values[rows]))
        pending.clear()

    total, stored = int(packed.sum()), int(packed[~todo].sum())
    hidden = rank > 0 or bool(os.environ.get("TQDM_DISABLE"))
    saved = time.monotonic()
    try:
        with tqdm(total=total, initial=stored, desc=description, unit="tok", unit_scale=True, disable=hidden) as bar:
            for step in range(0, len(todo_batches), world):
                index = step + rank
                # A rank without a batch repeats the last one: forwards of engines wait for each other.
                rows = todo_batches[min(index, len(todo_batches) - 1)]
                scored = torch.stack([x.float().cpu() for x in score(pairs.rows(rows))], 1)
                if index < len(todo_batches):
                    _require_finite(rows, scored)
                    values[rows] = scored
                    pending += rows.tolist()
                if time.monotonic() - saved >= SECONDS_BETWEEN_SHARDS:
                    store()
                    saved = time.monotonic()
                bar.update(sum(int(packed[batch].sum()) for batch in todo_batches[step : step + world]))
    finally:
        store()
    return failure


def _failure(write: Callable[[], None]) -> Reason | None:
    """Calls `write`. Returns why it failed, and logs it, or None. The
    run continues without the cache.
    """
    try:
        write()
    except (OSError, ValueError) as error:  # ValueError: a stored file cannot be read any more
        reason = Reason("cache-file", done="written any more", error=error)
        if not strict():  # every rank raises it at the end
            warn(f"reference log-probabilities: not cached, {reason.named}")
        return reason
    return None


def _require_finite(rows: np.ndarray, scored: Tensor) -> None:
    finite = scored.isfinite().all(1)
    if not finite.all():
        row = rows[int((~finite).nonzero()[0])]
        raise ValueError(f"precompute: the reference's log-probabilities must be finite; got others for row {row}")
