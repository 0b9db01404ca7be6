"""Cache files are written atomically, and no value of an invalid file is used."""

import errno
import os
import pickle
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fastdpo import atomic_files, ref_logps
from fastdpo.ref_logps.shards import Shards
from tests.support.ref_logps import assert_close, exact, tokens
from tests.support.trl.dpo import tiny_model

ROWS = tokens(6)


def loaded(path) -> dict[str, torch.Tensor]:
    """Returns copies: safetensors maps the file into memory, and the tests write to it."""
    return {name: x.clone() for name, x in load_file(path).items()}


@pytest.fixture
def stored(tmp_path):
    """The one file of a finished run."""
    ref_logps.precompute(tiny_model(), ROWS, cache_dir=tmp_path)
    (path,) = tmp_path.rglob("*.safetensors")
    return path


def precompute(path):
    return ref_logps.precompute(tiny_model(), ROWS, cache_dir=path.parent.parent)


def test_the_file_format_is_as_documented(stored):
    tensors = loaded(stored)
    assert {name: x.dtype for name, x in tensors.items()} == {
        "rows": torch.int64,
        "chosen": torch.float32,
        "rejected": torch.float32,
    }
    logps = precompute(stored)
    assert torch.equal(tensors["chosen"][tensors["rows"].argsort()], logps.chosen)
    assert_close(logps, exact(tiny_model(), ROWS))
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]


def altered(path, **changes):
    """Writes a file with changed tensors, and with the metadata that it had."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {**loaded(path), **changes}
    save_file({name: x for name, x in tensors.items() if x is not None}, path, metadata)


INVALID = {  # what is cut, appended or flipped in a file stands in tests/fuzz/test_files.py
    "pickle": ("be a whole safetensors file", lambda path: path.write_bytes(pickle.dumps([1.0] * 12))),
    "torch file": ("be a whole safetensors file", lambda path: torch.save(loaded(path), path)),
    "no digest": ("have the digest", lambda path: save_file(loaded(path), path, {"key": path.parent.name})),
    "no metadata": ("have the key", lambda path: save_file(loaded(path), path)),
    "another key": ("have the key", lambda path: save_file(loaded(path), path, {"key": "0" * 64})),
    "another dtype": ("have the digest", lambda path: altered(path, chosen=loaded(path)["chosen"].view(torch.int32))),
    "another shape": ("have the digest", lambda path: altered(path, chosen=loaded(path)["chosen"][None])),
    "another value": ("have the digest", lambda path: altered(path, rows=loaded(path)["rows"].roll(1))),
    "no rows": ("have the digest", lambda path: altered(path, rows=None)),
    "one more tensor": ("have the digest", lambda path: altered(path, more=torch.zeros(6))),
}


def not_a_file(path, make):
    path.unlink()
    make(path)


INVALID |= {
    "directory": ("be readable", lambda path: not_a_file(path, Path.mkdir)),
    "circle of links": ("be readable", lambda path: not_a_file(path, lambda path: path.symlink_to(path.name))),
}


@pytest.mark.parametrize("name", INVALID)
def test_the_error_for_an_invalid_file_names_it(stored, name):
    message, spoil = INVALID[name]
    good = stored.read_bytes()
    spoil(stored)
    with pytest.raises(ValueError) as error:
        precompute(stored)
    assert str(stored) in str(error.value)
    assert message in str(error.value)
    assert "Delete it" in str(error.value)
    stored.rmdir() if name == "directory" else stored.unlink()
    assert_close(precompute(stored), exact(tiny_model(), ROWS))
    (again,) = stored.parent.glob("*.safetensors")
    assert len(again.read_bytes()) == len(good)


def test_nothing_is_unpickled(stored, tmp_path):
    class Mark:
        def __reduce__(self):
            return (open, (str(tmp_path / "unpickled"), "w"))

    for path in (stored, stored.with_suffix(".pt"), stored.with_suffix(".pkl")):
        path.write_bytes(pickle.dumps(Mark()))
    with pytest.raises(ValueError, match="whole safetensors file"):
        precompute(stored)
    assert not (tmp_path / "unpickled").exists()


def abandoned(path) -> None:
    """Makes a file as old as one whose writer was killed long ago."""
    old = time.time() - atomic_files.ABANDONED_AFTER - 60
    os.utime(path, (old, old))


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied"), OSError(errno.EIO, "broken disk")])
def test_the_error_for_an_unreadable_file_names_it_and_keeps_it(tmp_path, monkeypatch, error):
    values = -torch.arange(1.0, 13.0).view(6, 2)
    key = key_in(tmp_path)
    shards = Shards(tmp_path / key, key, 6)
    for rows in ([0, 1, 2], [3, 4, 5]):
        shards.write(torch.tensor(rows), values[rows])
    unreadable = min(shards.directory.glob("*.safetensors"))
    read = Path.read_bytes

    def read_bytes(path):
        if path == unreadable:
            raise error
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_bytes)
        with pytest.raises(ValueError, match="must be readable") as raised:
            ref_logps.precompute(tiny_model(), ROWS, cache_dir=tmp_path)
        with pytest.raises(ValueError, match="must be readable"):
            shards.merge(values)
    assert str(unreadable) in str(raised.value)
    assert len(list(shards.directory.glob("*.safetensors"))) == 2
    logps = ref_logps.precompute(tiny_model(), ROWS, cache_dir=tmp_path)
    assert torch.equal(torch.stack(logps, 1), values)


def key_in(cache) -> str:
    """Returns the cache key of `ROWS`, and empties its directory."""
    ref_logps.precompute(tiny_model(), ROWS, cache_dir=cache)
    (directory,) = cache.iterdir()
    for path in directory.iterdir():
        path.unlink()
    return directory.name


def test_a_file_that_is_being_written_is_kept(stored):
    """Another process may be writing it."""
    with atomic_files.temporary(stored.parent, b"half") as live:
        precompute(stored)
        atomic_files.remove_leftovers(stored.parent)
        assert live.exists()
        live.replace(stored.parent / ".dead.tmp")
    abandoned(stored.parent / ".dead.tmp")
    precompute(stored)
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]


def test_many_files_become_one(tmp_path):
    shards = Shards(tmp_path / "key", "key", 5)
    values = -torch.arange(10.0).view(5, 2)
    for rows in ([3, 1], [0], [4, 2]):
        shards.write(torch.tensor(rows), values[rows])
        assert torch.equal(shards.read()[rows], values[rows])
    assert len(list(shards.directory.glob("*.safetensors"))) == 3
    shards.merge(values)
    assert len(list(shards.directory.glob("*.safetensors"))) == 1
    assert torch.equal(shards.read(), values)


@pytest.mark.parametrize("first", ["0", "f"])
def test_two_jobs_merge_at_the_same_time(tmp_path, monkeypatch, first):
    """One may delete what the other has listed, but never the last value."""
    values = -torch.arange(1.0, 9.0).view(4, 2)
    jobs = [Shards(tmp_path, "key", 4) for _ in range(2)]
    for row in range(4):
        jobs[0].write(torch.tensor([row]), values[row : row + 1])
    names = iter(["8" * 32, first * 32])  # of the second job, which is done first
    monkeypatch.setattr("fastdpo.ref_logps.shards.uuid4", lambda: type("", (), {"hex": next(names)}))
    sync, running = os.fsync, []

    def interrupted(file):
        sync(file)
        if not running:
            running.append(file)
            jobs[1].merge(values)  # the first job has written its file, and not renamed it

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        jobs[0].merge(values)
    assert running
    assert torch.equal(jobs[0].read(), values)
    jobs[0].merge(values)
    assert torch.equal(jobs[0].read(), values)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_the_first_file_by_name_wins_if_two_have_the_same_row(tmp_path):
    shards = Shards(tmp_path / "key", "key", 2)
    for value in (-1.0, -2.0):
        shards.write(torch.tensor([0, 1]), torch.full((2, 2), value))
    first = min(shards.directory.glob("*.safetensors"))
    assert torch.equal(shards.read()[:, 0], loaded(first)["chosen"])
