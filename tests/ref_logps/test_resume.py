"""A run that was killed at any time resumes with the stored values."""

import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fastdpo
from fastdpo import atomic_files, ref_logps
from fastdpo.ref_logps import filling
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
    assert len(list(directory.iterdir())) == 1, "only one file"


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_values_computed_before_an_error_are_stored(tmp_path, monkeypatch, error):
    rows = tokens(30)
    taken = []
    read = filling.Pairs.rows

    def rows_of(pairs, indices):
        taken.extend(indices if len(indices) == 1 else [])  # except when lengths are read
        if len(taken) == 12:
            raise error
        return read(pairs, indices)

    with monkeypatch.context() as patch:
        patch.setattr(filling.Pairs, "rows", rows_of)
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
    assert len(list(directory.iterdir())) > 1, "one file and leftovers"
    before = fastdpo.calls.copy()
    monkeypatch.setattr(atomic_files, "ABANDONED_AFTER", -1)
    logps = ref_logps.precompute(tiny_model(), rows, cache_dir=tmp_path)
    assert fastdpo.calls == before
    assert_close(logps, exact(tiny_model(), rows))
    assert not list(directory.glob(".*"))
