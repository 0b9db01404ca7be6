"""Tokenized pairs, what a model must give them, and processes to compute it in."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import comparison
import torch
import torch.distributed as dist
from comparison import RELATIVE
from torch.nn.functional import log_softmax
from tqdm import tqdm

from fastdpo import ref_logps
from fastdpo.ref_logps import RefLogps, passes


def tokens(n: int, seed: int = 0, longest: int = 14) -> list[dict[str, list[int]]]:
    """Ragged rows as TRL tokenizes them; among them answers that begin alike, and prompts of no token."""
    rng = random.Random(seed)

    def ids(low: int) -> list[int]:
        return [rng.randrange(3, 97) for _ in range(rng.randint(low, longest))]

    rows = [{"prompt_ids": ids(0), "chosen_ids": ids(1), "rejected_ids": ids(1)} for _ in range(n)]
    rows[0] = {"prompt_ids": [], "chosen_ids": [7], "rejected_ids": [8, 9]}  # a first token is scored by nothing
    rows[1]["rejected_ids"] = [*rows[1]["chosen_ids"], 5]
    return rows


def exact(
    model,
    rows: Sequence[dict],
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
) -> RefLogps:
    """By definition: one row at a time, in float64."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped one has no float64
    model = model.double().eval()
    sums = []
    for row in rows:
        logps = []
        for answer in (row["chosen_ids"], row["rejected_ids"]):
            ids = row["prompt_ids"] + answer
            first = len(row["prompt_ids"])
            if max_length is not None:
                cut = max(len(ids) - max_length, 0)
                ids = ids[cut:] if truncation_mode == "keep_end" else ids[:max_length]
                first -= cut if truncation_mode == "keep_end" else 0
            first = max(first, 1)
            if first >= len(ids):
                logps.append([])
                continue
            with torch.no_grad():
                of_vocabulary = log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
            logps.append([of_vocabulary[i - 1, ids[i]].item() for i in range(first, len(ids))])
        shorter = min(map(len, logps))
        tail = 1.0 if ld_alpha is None else ld_alpha
        sums.append([sum(x[:shorter]) + tail * sum(x[shorter:]) for x in logps])
    return RefLogps(*torch.tensor(sums).T)


def assert_close(found: RefLogps, expected: RefLogps, relative: float = RELATIVE) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        comparison.assert_close(a, b.float(), relative)


def start(target: Callable, *args) -> multiprocessing.Process:
    """A fork: it has everything imported."""

    def run() -> None:
        tqdm.set_lock(threading.RLock())  # its own is shared between forks: one that is killed might hold it
        target(*args)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def rank_of(rank: int, world: int, directory: Path, work: Callable[[int], object], seconds: float = 600) -> None:
    """Runs `work` as one rank. Writes its result, or the message of its ValueError, to the directory.

    No collective may last longer than `seconds`.
    """
    store, limit = f"file://{directory}/store", timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)
    try:
        result = work(rank)
    except ValueError as error:
        result = str(error)
    torch.save(result, directory / f"rank{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo workers that have imported transformers may abort while they shut down


def ranks(world: int, directory: Path, work: Callable[[int], object]) -> list:
    """Results of `work(rank)` in each of `world` gloo processes."""
    directory.mkdir(parents=True, exist_ok=True)
    processes = [start(rank_of, rank, world, directory, work) for rank in range(world)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    (directory / "store").unlink(missing_ok=True)
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def slowly(model, rows: Sequence[dict], cache: Path, seconds: float) -> RefLogps:
    """In many small batches that take a while, each stored at once: there is time to be killed."""
    score_rows = passes.Pairs.rows

    def rows_of(pairs, indices):
        time.sleep(seconds)
        return score_rows(pairs, indices)

    passes.SECONDS_BETWEEN_SHARDS = 0.0
    passes.Pairs.rows = rows_of
    return ref_logps.precompute(model, rows, cache_dir=cache, tokens_per_batch=60)
