"""A run that was killed at any time resumes with the stored values."""

import os
import random
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fastdpo
from fastdpo import atomic_files, ref_logps
from fastdpo.ref_logps import passes
from fastdpo.ref_logps.shards import MISSING, Shards
from tests.support.ref_logps import assert_close, exact, slowly, start, tokens
from tests.support.trl.dpo import tiny_model


def stored_rows(cache, n: int) -> int:
    directory = next(cache.glob("*"), None)
    if directory is None:
        return 0
    return int((Shards(directory, directory.name, n).read()[:, 0] != MISSING).sum())


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.thorough)])
def test_killed_many_times(kills, tmp_path, monkeypatch):
    n = 30 * kills
    rows, cache = tokens(n), tmp_path / "cache"
    rng = random.Random(0)
    progress = [0]
    for _ in range(kills):
        process = start(slowly, tiny_model(), rows, cache, 0.01)
        while stored_rows(cache, n) == progress[-1] and process.is_alive():
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it finished before it was killed"
        progress.append(stored_rows(cache, n))
    assert all(a < b for a, b in pairwise(progress)), progress
    assert progress[-1] < n

    before = fastdpo.calls.copy()
    monkeypatch.setattr(atomic_files, "ABANDONED_AFTER", -1)
    logps = ref_logps.precompute(tiny_model(), rows, cache_dir=cache, tokens_per_batch=1)
    assert (fastdpo.calls - before).total() == n - progress[-1], "one call for each missing row"
    assert_close(logps, ref_logps.precompute(tiny_model(), rows))
    (directory,) = cache.iterdir()
    assert len(list(directory.iterdir())) == 2, "only one file and the lock"


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_values_computed_before_an_error_are_stored(tmp_path, monkeypatch, error):
    rows = tokens(30)
    taken = []
    read = passes.Pairs.rows

    def rows_of(pairs, indices):
        taken.extend(indices if len(indices) == 1 else [])  # except when lengths are read
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


def test_shards_are_written_regularly(tmp_path, monkeypatch):
    clock = iter(range(0, 10_000, 10))  # seconds, at each call
    written = []
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    write = Shards.write
    monkeypatch.setattr(
        Shards, "write", lambda self, rows, values: written.append(len(rows)) or write(self, rows, values)
    )
    ref_logps.precompute(tiny_model(), tokens(20), cache_dir=tmp_path, tokens_per_batch=1)
    assert sum(written[:-1]) == 20
    assert written[-1] == 20, "and merged at the end"
    assert 4 <= len(written) - 1 <= 10


def stop_at(function: str, call: int) -> None:
    """Kills this process at the n-th call of `Path.replace` or `Path.unlink` from now on."""
    stock, calls = getattr(Path, function), []

    def killed(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(path, *args, **kwargs)

    setattr(Path, function, killed)


@pytest.mark.parametrize(("function", "call"), [("replace", 1), ("unlink", 1), ("unlink", 2), ("unlink", 4)])
def test_killed_during_the_merge(tmp_path, monkeypatch, function, call):
    """All values are stored then, but leftover files must be removed."""
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
    assert len(list(directory.iterdir())) > 2, "the lock, one file and leftovers"
    before = fastdpo.calls.copy()
    monkeypatch.setattr(atomic_files, "ABANDONED_AFTER", -1)
    logps = ref_logps.precompute(tiny_model(), rows, cache_dir=tmp_path)
    assert fastdpo.calls == before
    assert_close(logps, exact(tiny_model(), rows))
    assert len(list(directory.iterdir())) == 2


def terminated(tmp_path, prepare=lambda: None) -> tuple[int | None, int]:
    """Returns the exit code of a run stopped by SIGTERM, and how many of 200 rows it stored."""
    ready, rows = tmp_path / "ready", tokens(200)

    def work():
        prepare()
        read, taken = passes.Pairs.rows, []

        def rows_of(pairs, indices):
            taken.extend(indices if len(indices) == 1 else [])  # except when lengths are read
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
    for _ in range(2):  # a launcher repeats the scheduler's signal
        os.kill(process.pid, signal.SIGTERM)
    process.join()
    return process.exitcode, stored_rows(tmp_path / "cache", 200)


def test_sigterm_stores_values_before_the_process_ends(tmp_path):
    code, stored = terminated(tmp_path)
    assert code == -signal.SIGTERM
    assert 11 <= stored < 100
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_existing_sigterm_handler_is_kept(tmp_path):
    code, stored = terminated(tmp_path, lambda: signal.signal(signal.SIGTERM, lambda *_: os._exit(7)))
    assert (code, stored) == (7, 0)


def test_the_sigterm_handler_is_restored(tmp_path):
    ref_logps.precompute(tiny_model(), tokens(3), cache_dir=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    results = []
    thread = threading.Thread(target=lambda: results.append(ref_logps.precompute(tiny_model(), tokens(3))))
    thread.start()
    thread.join()
    assert results, "only the main thread can set handlers"
