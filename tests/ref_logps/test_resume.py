"""Killed at any moment, it goes on where it was."""

import os
import random
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

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
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    write = Shards.write
    monkeypatch.setattr(
        Shards, "write", lambda self, rows, values: written.append(len(rows)) or write(self, rows, values)
    )
    ref_logps.precompute(tiny_model(), tokens(20), cache_dir=tmp_path, tokens_per_batch=1)
    assert sum(written[:-1]) == 20
    assert written[-1] == 20, "and merged in the end"
    assert 4 <= len(written) - 1 <= 10


def stop_at(function: str, call: int) -> None:
    """Kills this process when it deletes or renames the file that is the n-th since."""
    stock, calls = getattr(Path, function), []

    def killed(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(path, *args, **kwargs)

    setattr(Path, function, killed)


@pytest.mark.parametrize(("function", "call"), [("replace", 1), ("unlink", 1), ("unlink", 2), ("unlink", 4)])
def test_killed_while_it_merges(tmp_path, function, call):
    """Nothing is left to compute then, but there is something to clean up."""
    rows, merge = tokens(20), Shards.merge

    def killed(shards, values):
        stop_at(function, call)
        merge(shards, values)

    def work():
        Shards.merge = killed
        slowly(tiny_model(), rows, tmp_path, 0.0)

    process = start(work)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (directory,) = tmp_path.iterdir()
    assert len(list(directory.iterdir())) > 2, "the lock, one file, and what is left"
    before = fastdpo.calls.copy()
    logps = ref_logps.precompute(tiny_model(), rows, cache_dir=tmp_path)
    assert fastdpo.calls == before
    assert_close(logps, exact(tiny_model(), rows))
    assert len(list(directory.iterdir())) == 2


def terminated(tmp_path, prepare=lambda: None) -> tuple[int | None, int]:
    """The exit code of a run that SIGTERM has reached in the middle, and how many of 200 rows it has stored."""
    ready, rows = tmp_path / "ready", tokens(200)

    def work():
        prepare()
        read, taken = passes.Pairs.rows, []

        def rows_of(pairs, indices):
            taken.extend(indices if len(indices) == 1 else [])  # not the reading of lengths
            if len(taken) == 12:
                ready.touch()
            if len(taken) >= 12:
                time.sleep(0.05)
            return read(pairs, indices)

        passes.Pairs.rows = rows_of
        ref_logps.precompute(tiny_model(), rows, cache_dir=tmp_path / "cache", tokens_per_batch=1)

    process = start(work)
    while not ready.exists() and process.is_alive():
        time.sleep(0.01)
    for _ in range(2):  # a launcher repeats the scheduler's
        os.kill(process.pid, signal.SIGTERM)
    process.join()
    return process.exitcode, stored_rows(tmp_path / "cache", 200)


def test_sigterm_ends_it_after_storing(tmp_path):
    code, stored = terminated(tmp_path)
    assert code == -signal.SIGTERM
    assert 11 <= stored < 100
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_handler_of_sigterm_that_is_there_stays(tmp_path):
    code, stored = terminated(tmp_path, lambda: signal.signal(signal.SIGTERM, lambda *_: os._exit(7)))
    assert (code, stored) == (7, 0)


def test_the_handler_of_sigterm_is_given_back(tmp_path):
    ref_logps.precompute(tiny_model(), tokens(3), cache_dir=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    found = []
    thread = threading.Thread(target=lambda: found.append(ref_logps.precompute(tiny_model(), tokens(3))))
    thread.start()
    thread.join()
    assert found, "only the main thread can set handlers"
