"""One pass over the pairs that are not stored yet, shared between ranks, stored as it goes."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ..integrations.fused_forward import strict
from .pairs import Pairs, batches
from .shards import MISSING, Shards, missing, remove_leftovers, unusable

logger = logging.getLogger("fastdpo")

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
    if not (values == MISSING).any():
        if shards is not None:
            shards.clean(values)
        return _split(values)
    if shards is not None and off_anywhere(unusable(shards.directory)):
        shards = None
    with ending_by_sigterm(), ExitStack() as stack:
        if shards is not None and not _lock(shards, stack):
            shards = None
        if shards is not None:
            # Read again: the process that held the lock may have stored more values meanwhile.
            values = torch.maximum(values, _agreed(shards.read, device))
        failure = _fill(values, score, pairs, shards, bounds, description)
        values = _merged(values, device)
        if shards is not None and failure is None and _rank_and_world()[0] == 0:
            failure = _failure(partial(shards.merge, values))
    if strict():
        off_anywhere(failure)
    return _split(values)


def _split(values: Tensor) -> RefLogps:
    return RefLogps(values[:, 0].clone(), values[:, 1].clone())


def _lock(shards: Shards, stack: ExitStack) -> bool:
    """Rank 0 takes the lock while the others wait. Returns False, logged, if the file system does not support it.

    All ranks take part in a short collective after each attempt: one that lasted as long as the wait would exceed the
    time limit of the process group.
    """
    held, failure = "held", None
    if _rank_and_world()[0] == 0:
        try:
            stack.enter_context(shards.lock(lambda: of_all_ranks(held)))
        except (OSError, NotImplementedError) as error:  # NotImplementedError: not on this file system
            failure = f"the lock in {shards.directory} failed: {error}"
        of_all_ranks(failure)
    else:
        while (failure := of_all_ranks(None)[0]) == held:
            continue
        remove_leftovers(shards.directory)  # on a disk of its own
    return not off_anywhere(failure)


def _fill(
    values: Tensor, score: Score, pairs: Pairs, shards: Shards | None, bounds: Bounds, description: str
) -> str | None:
    """Computes this rank's part of the missing values. Returns why they could not be stored, if they could not."""
    rank, world = _rank_and_world()
    sizes = pairs.sizes()
    todo = (values[:, 0] == MISSING).numpy()
    empty = (todo & ~sizes.scored).nonzero()[0]
    values[empty] = 0.0
    todo &= sizes.scored
    plan = batches(todo.nonzero()[0], sizes, *bounds)
    pending: list[int] = empty.tolist() if rank == 0 else []
    failure: str | None = None

    def store() -> None:
        nonlocal failure
        if shards is not None and pending and failure is None:
            rows = torch.tensor(pending)
            failure = _failure(partial(shards.write, rows, values[rows]))
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
    return failure


def _failure(write: Callable[[], None]) -> str | None:
    """The reason why writing failed, which is logged, or None. The run goes on without the cache."""
    try:
        write()
    except (OSError, ValueError) as error:  # ValueError: a stored file can't be read any more
        reason = f"values can't be stored any more: {error}"
        if not strict():  # every rank raises it at the end
            logger.warning("reference log-probabilities: %s", reason)
        return reason
    return None


def off_anywhere(reason: str | None) -> bool:
    """Returns whether any rank has a reason to go on without the cache. Logs it once; raises in strict mode.

    Every rank must call this.
    """
    from ..integrations.fused_forward import say_off

    reasons = sorted({x for x in of_all_ranks(reason) if x is not None})
    if reasons and (strict() or _rank_and_world()[0] == 0):
        say_off(f"reference log-probabilities: not cached, {'; '.join(reasons)}")
    return bool(reasons)


class _Terminated(BaseException):
    """Raised where SIGTERM arrives, as KeyboardInterrupt is for SIGINT."""


@contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """On SIGTERM, unwinds the block, so that computed values are stored, and then lets the signal end the process.

    Schedulers send SIGTERM some time before they kill a job. A handler that is already installed is left in place.
    """
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    received = False

    def unwind(*_: object) -> None:
        nonlocal received
        if not received:  # a launcher may repeat the scheduler's signal
            received = True
            raise _Terminated

    try:
        try:
            signal.signal(signal.SIGTERM, unwind)
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    finally:  # the signal may arrive inside the inner block
        if received:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


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
