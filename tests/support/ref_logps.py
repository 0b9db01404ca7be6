"""Tokenized pairs, their exact reference log-probabilities, and processes that compute them."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import log_softmax
from tqdm import tqdm

from fastdpo import ref_logps
from fastdpo.ref_logps import RefLogps, filling
from tests.support import comparison
from tests.support.comparison import RELATIVE


def tokens(n: int, seed: int = 0, longest: int = 14) -> list[dict[str, list[int]]]:
    """Ragged rows in the format of TRL's tokenization.

    Some answers share a prefix, and some prompts are empty.
    """
    rng = random.Random(seed)

    def ids(low: int) -> list[int]:
        return [rng.randrange(3, 97) for _ in range(rng.randint(low, longest))]

    rows = [{"prompt_ids": ids(0), "chosen_ids": ids(1), "rejected_ids": ids(1)} for _ in range(n)]
    rows[0] = {"prompt_ids": [], "chosen_ids": [7], "rejected_ids": [8, 9]}  # no token predicts the first
    rows[1]["rejected_ids"] = [*rows[1]["chosen_ids"], 5]
    return rows


def exact(
    model,
    rows: Sequence[dict],
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    ld_alpha: float | None = None,
) -> RefLogps:
    """Reference log-probabilities of one row at a time, without padding, in float64."""
    model = comparison.double(model).eval()
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
                all_logps = log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1)
            logps.append([all_logps[i - 1, ids[i]].item() for i in range(first, len(ids))])
        shorter = min(map(len, logps))
        tail = 1.0 if ld_alpha is None else ld_alpha
        sums.append([sum(x[:shorter]) + tail * sum(x[shorter:]) for x in logps])
    return RefLogps(*torch.tensor(sums).T)


def assert_close(result: RefLogps, expected: RefLogps, relative: float = RELATIVE) -> None:
    """Asserts that log-probabilities are float32 and equal the expected ones up to rounding."""
    for a, b in zip(result, expected, strict=True):
        assert a.dtype == torch.float32
        comparison.assert_close(a, b.float(), relative)


def start(target: Callable, *args) -> multiprocessing.Process:
    """Calls `target(*args)` in a forked process, which need not import anything again."""

    def run() -> None:
        # Forks share tqdm's default lock, and a killed process might hold it.
        tqdm.set_lock(threading.RLock())
        target(*args)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def rank_of(rank: int, world: int, directory: Path, work: Callable[[int], object], seconds: float = 600) -> None:
    """Runs `work(rank)` as one rank of a gloo group.

    Saves its result, or the message of its ValueError, in the directory. A collective that lasts
    longer than `seconds` fails.
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
    """Runs `work(rank)` in `world` gloo processes and returns their results."""
    directory.mkdir(parents=True, exist_ok=True)
    processes = [start(rank_of, rank, world, directory, work) for rank in range(world)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    (directory / "store").unlink(missing_ok=True)
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(world)]


def slowly(model, rows: Sequence[dict], cache: Path, seconds: float) -> RefLogps:
    """Precomputes in many slow, small batches and stores each at once.

    A test can kill it midway.
    """
    score_rows = filling.Pairs.rows

    def rows_of(pairs, indices):
        time.sleep(seconds)
        return score_rows(pairs, indices)

    filling.SECONDS_BETWEEN_SHARDS = 0.0
    filling.Pairs.rows = rows_of
    return ref_logps.precompute(model, rows, cache_dir=cache, tokens_per_batch=60)
