"""The cache is optional: a run continues if the disk cannot be written."""

import errno
import os

import pytest
import torch

import fastdpo
from fastdpo import ref_logps
from fastdpo.ref_logps import filling
from fastdpo.ref_logps.shards import Shards
from tests.support.ref_logps import assert_close, exact, ranks, tokens
from tests.support.trl.dpo import tiny_model

ROWS = tokens(12)


def full_disk(monkeypatch, after: int = 0) -> None:
    """Makes writes fail with ENOSPC after `after` files."""
    sync, left = os.fsync, [after]

    def fsync(file) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture
def below_a_file(tmp_path):
    """A directory that nobody can create, not even root."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "cache"


@pytest.mark.parametrize("is_full", [False, True], ids=["not a directory", "a full disk"])
def test_a_directory_that_cannot_be_written(is_full, tmp_path, below_a_file, caplog, monkeypatch):
    cache, error = (tmp_path, errno.ENOSPC) if is_full else (below_a_file, errno.ENOTDIR)
    if is_full:
        full_disk(monkeypatch)
    logps = ref_logps.precompute(tiny_model(), ROWS, cache_dir=cache)
    assert_close(logps, exact(tiny_model(), ROWS))
    (warning,) = caplog.messages
    assert str(cache) in warning
    assert os.strerror(error) in warning
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with pytest.raises(fastdpo.NotFused, match="not cached"):
        ref_logps.precompute(tiny_model(), ROWS, cache_dir=cache)


@pytest.mark.parametrize("strict", [False, True])
def test_a_disk_that_becomes_full_during_the_run(tmp_path, caplog, monkeypatch, strict):
    """The next run uses the values that were written before the disk was full."""
    monkeypatch.setattr(filling, "SECONDS_BETWEEN_SHARDS", 0.0)
    monkeypatch.setenv("FASTDPO_STRICT", str(int(strict)))
    with monkeypatch.context() as patch:
        full_disk(patch, after=1 + 4)
        if strict:
            with pytest.raises(fastdpo.NotFused, match=os.strerror(errno.ENOSPC)):
                ref_logps.precompute(tiny_model(), ROWS, cache_dir=tmp_path, tokens_per_batch=1)
        else:
            logps = ref_logps.precompute(tiny_model(), ROWS, cache_dir=tmp_path, tokens_per_batch=1)
            assert_close(logps, exact(tiny_model(), ROWS))
            (warning,) = caplog.messages
            assert os.strerror(errno.ENOSPC) in warning
    assert len(list(tmp_path.rglob("*.safetensors"))) == 4
    assert not list(tmp_path.rglob("*.tmp"))
    before = fastdpo.calls.copy()
    ref_logps.precompute(tiny_model(), ROWS, cache_dir=tmp_path, tokens_per_batch=1)
    assert (fastdpo.calls - before).total() == 12 - 4


def test_a_finished_cache_on_a_full_disk_is_read(tmp_path, caplog, monkeypatch):
    stored = ref_logps.precompute(tiny_model(), ROWS, cache_dir=tmp_path)
    full_disk(monkeypatch)
    before = fastdpo.calls.copy()
    logps = ref_logps.precompute(tiny_model(), ROWS, cache_dir=tmp_path)
    assert torch.equal(logps.chosen, stored.chosen)
    assert not caplog.messages
    assert fastdpo.calls == before


@pytest.mark.parametrize("when", ["at the start", "in the middle", "at the merge"])
@pytest.mark.parametrize("strict", [False, True])
def test_one_rank_of_two_cannot_write(tmp_path, monkeypatch, when, strict):
    """The other rank continues, and neither blocks."""
    rank_of_error = 0 if when == "at the merge" else 1
    after = {"at the start": 0, "in the middle": 2, "at the merge": 1 + 6}[when]
    monkeypatch.setenv("FASTDPO_STRICT", str(int(strict)))

    def work(rank: int):
        filling.SECONDS_BETWEEN_SHARDS = 0.0
        if rank == rank_of_error:
            full_disk(pytest.MonkeyPatch(), after)
        try:
            return ref_logps.precompute(tiny_model(), ROWS, cache_dir=tmp_path / "cache", tokens_per_batch=1)
        except fastdpo.NotFused as error:
            return str(error)

    for result in ranks(2, tmp_path / "ranks", work):
        if strict:
            assert os.strerror(errno.ENOSPC) in result
        else:
            assert_close(result, exact(tiny_model(), ROWS))
    stored = len(list(tmp_path.rglob("*.safetensors")))
    assert stored == {"at the start": 0, "in the middle": 1, "at the merge": 12}[when]
    assert not list(tmp_path.rglob("*.tmp"))


def test_unusable_reason_of_a_directory(tmp_path, below_a_file, monkeypatch):
    def unusable_reason(directory) -> str | None:
        return Shards(directory, "key", 1).unusable_reason()

    assert unusable_reason(tmp_path / "new" / "directory") is None
    assert list((tmp_path / "new" / "directory").iterdir()) == []
    assert "Not a directory" in (unusable_reason(below_a_file) or "")
    assert "File exists" in (unusable_reason(below_a_file.parent) or "")
    full_disk(monkeypatch)
    assert os.strerror(errno.ENOSPC) in (unusable_reason(tmp_path) or "")
    assert Shards(below_a_file, "key", 1).files() == []


def test_a_url_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    """As a path, it would be a directory below the working directory."""
    monkeypatch.chdir(tmp_path)
    got = "got 's3://bucket/cache', a URL: mount the storage, or copy its files to a directory"
    with pytest.raises(ValueError, match=f"precompute: cache_dir must be the path of a directory, or None; {got}"):
        ref_logps.precompute(tiny_model(), ROWS, cache_dir="s3://bucket/cache")
    assert not list(tmp_path.iterdir())
