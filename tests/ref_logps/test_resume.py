"""Killed at any moment, it goes on where it was."""

import os
import random
import signal
import time
from itertools import pairwise

import pytest
import torch
from ref_logps_runs import assert_close, exact, slowly, start, tokens
from trl_runs import tiny_model

import fastdpo
from fastdpo import ref_logps
from fastdpo.ref_logps import passes
from fastdpo.ref_logps.shards import MISSING, Shards


def stored_rows(cache, n: int) -> int:
    directory = next(cache.glob("*"), None)
    if directory is None:
        return 0
    return int((Shards(directory, directory.name, n).read()[:, 0] != MISSING).sum())


def test_killed_twenty_times(tmp_path):
    rows, cache = tokens(600), tmp_path / "cache"
    rng = random.Random(0)
    progress = [0]
    for _ in range(20):
        process = start(slowly, tiny_model(), rows, cache, 0.01)
        while stored_rows(cache, 600) == progress[-1] and process.is_alive():
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was done before it could be killed"
        progress.append(stored_rows(cache, 600))
    assert all(a < b for a, b in pairwise(progress)), progress
    assert progress[-1] < 600

    before = fastdpo.calls.copy()
    logps = ref_logps.precompute(tiny_model(), rows, cache_dir=cache, tokens_per_batch=1)
    assert (fastdpo.calls - before).total() == 600 - progress[-1], "a call for each row that was missing, no other"
    assert_close(logps, ref_logps.precompute(tiny_model(), rows))
    (directory,) = cache.iterdir()
    assert len(list(directory.iterdir())) == 2, "one file and the lock: no leftovers"


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_what_was_computed_before_an_error_is_stored(tmp_path, monkeypatch, error):
    rows = tokens(30)
    taken = []
    read = passes.Pairs.rows

    def rows_of(pairs, indices):
        taken.extend(indices if len(indices) == 1 else [])  # not the reading of lengths
        if len(taken) == 12:
            raise error
        return read(pairs, indices)

    with monkeypatch.context() as patch:
        patch.setattr(passes.Pairs, "rows", rows_of)
        with pytest.raises(error):
            ref_logps.precompute(tiny_model(), rows, cache_dir=tmp_path, tokens_per_batch=1)
    before = fastdpo.calls.copy()
    logps = ref_logps.precompute(tiny_model(), rows, cache_dir=tmp_path, tokens_per_batch=1)
    assert (fastdpo.calls - before).total() == 30 - 11
    assert_close(logps, exact(tiny_model(), rows))


def test_shards_are_written_from_time_to_time(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 10))  # seconds, at each look
    written = []
    monkeypatch.setattr(passes.time, "monotonic", lambda: next(clock))
    write = Shards.write
    monkeypatch.setattr(
        Shards, "write", lambda self, rows, values: written.append(len(rows)) or write(self, rows, values)
    )
    ref_logps.precompute(tiny_model(), tokens(20), cache_dir=tmp_path, tokens_per_batch=1)
    assert sum(written[:-1]) == 20
    assert written[-1] == 20, "and merged in the end"
    assert 4 <= len(written) - 1 <= 10
