"""A cache on storage without rename and locks: a file counts when it was moved to its name."""

import logging
import os
import signal
import time
from uuid import uuid4

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import fastdpo
from fastdpo import atomic_files, ref_logps
from fastdpo.atomic_files import ABANDONED_AFTER
from fastdpo.commands import doctor
from fastdpo.ref_logps import passes
from fastdpo.ref_logps.shards import MISSING, Shards
from fastdpo.storage import RemoteDirectory, checked_directory, directory_at
from tests.support.ref_logps import assert_close, exact, rank_of, ranks, slowly, start, tokens
from tests.support.trl.dpo import tiny_model

ROWS = tokens(12)


LISTINGS = {}


class Bucket(MemoryFileSystem):
    """Like object storage: there are no empty directories, and listings are kept until they are invalidated."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("bucket:/"))

    def makedirs(self, path, exist_ok=False):
        pass

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path)
        if path not in LISTINGS:
            LISTINGS[path] = super().ls(path, detail=True)
        return LISTINGS[path] if detail else [entry["name"] for entry in LISTINGS[path]]

    def invalidate_cache(self, path=None):
        LISTINGS.pop(path, None) if path else LISTINGS.clear()


fsspec.register_implementation("bucket", Bucket, clobber=True)


@pytest.fixture(params=["memory", "bucket", "file"])
def url(request, tmp_path):
    """A directory that does not exist yet."""
    if request.param == "file":
        return f"file://{tmp_path}/cache"
    return f"{request.param}://{uuid4().hex}/cache"


def counted(model, rows, url, **options) -> tuple[ref_logps.RefLogps, int]:
    before = fastdpo.calls.copy()
    logps = ref_logps.precompute(model, rows, cache_dir=url, tokens_per_batch=1, **options)
    return logps, (fastdpo.calls - before).total()


def objects(url) -> list[str]:
    """The URLs of all objects below a directory."""
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    return [filesystem.unstrip_protocol(name) for name in filesystem.find(path)]


def shards_of(url, n_rows: int) -> Shards:
    (directory,) = directory_at(url).directories()
    return Shards(directory, directory.name, n_rows)


def test_values_are_stored_and_read(url):
    expected = exact(tiny_model(), ROWS)
    for calls in (len(ROWS), 0):
        logps, actual = counted(tiny_model(), ROWS, url)
        assert_close(logps, expected)
        assert actual == calls
    (file,) = objects(url)
    assert file.endswith(".safetensors")


def test_many_files_become_one(url, monkeypatch):
    monkeypatch.setattr(passes, "SECONDS_BETWEEN_SHARDS", 0.0)
    written = []
    write = RemoteDirectory.write
    monkeypatch.setattr(RemoteDirectory, "write", lambda self, data: written.append(write(self, data)))
    logps, _ = counted(tiny_model(), ROWS, url)
    assert len(written) == len(ROWS) + 1
    assert len(objects(url)) == 1
    assert torch.equal(shards_of(url, len(ROWS)).read(), torch.stack(logps, 1))


@pytest.mark.parametrize("at", ["the file", "its move"])
def test_a_writer_that_dies_before_it_has_moved_a_file(tmp_path, at):
    """What it was writing is never read, and its rows are computed again."""
    url, written = f"file://{tmp_path}/cache", 7

    def work():
        filesystem = type(directory_at(url).filesystem)
        pipe_file, calls = filesystem.pipe_file, []

        def killed(self, path, data, **options):
            calls.append(path)
            if len(calls) == 1 + written + 1:  # after the probe and these files
                pipe_file(self, path, data[: len(data) // 2] if at == "the file" else data, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            pipe_file(self, path, data, **options)

        filesystem.pipe_file = killed
        passes.SECONDS_BETWEEN_SHARDS = 0.0
        counted(tiny_model(), ROWS, url)

    process = start(work)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    shards = shards_of(url, len(ROWS))
    assert len(objects(url)) == written + 1
    assert (len(shards.directory.files()), len(shards.directory.leftovers())) == (written, 1)
    assert int((shards.read()[:, 0] != MISSING).sum()) == written
    old = time.time() - ABANDONED_AFTER - 60
    os.utime(f"{shards.directory.path}/{shards.directory.leftovers()[0]}", (old, old))
    logps, calls = counted(tiny_model(), ROWS, url)
    assert calls == len(ROWS) - written
    assert_close(logps, exact(tiny_model(), ROWS))
    assert len(objects(url)) == 1, "what the dead writer left is gone"


def spoiled(data: bytes, damage: str) -> bytes:
    return {"cut": data[:-9], "empty": b"", "changed": data[:-8] + b"\1" + data[-7:]}[damage]


@pytest.mark.parametrize(
    ("damage", "message"),
    [("cut", "whole safetensors file"), ("empty", "whole safetensors file"), ("changed", "have the digest")],
)
def test_the_error_for_an_invalid_file_names_its_url(url, damage, message):
    counted(tiny_model(), ROWS, url)
    (file,) = objects(url)
    filesystem, path = fsspec.core.url_to_fs(file)
    filesystem.pipe_file(path, spoiled(filesystem.cat_file(path), damage))
    with pytest.raises(ValueError, match=message) as error:
        counted(tiny_model(), ROWS, url)
    assert file in str(error.value)
    assert "Delete it" in str(error.value)
    (finding,) = doctor.examine(cache=url)[f"cache {url}"]
    assert file in finding.detail
    filesystem.rm_file(path)  # as the message says
    logps, calls = counted(tiny_model(), ROWS, url)
    assert calls == len(ROWS)
    assert_close(logps, exact(tiny_model(), ROWS))
    assert len(objects(url)) == 1


def test_a_file_that_cannot_be_read(url, monkeypatch):
    counted(tiny_model(), ROWS, url)

    def cat_file(*_, **__):
        raise RuntimeError("connection reset")

    monkeypatch.setattr(type(directory_at(url).filesystem), "cat_file", cat_file)
    with pytest.raises(ValueError, match="must be readable; got RuntimeError: connection reset"):
        counted(tiny_model(), ROWS, url)
    assert len(objects(url)) == 1


def test_an_unfinished_file_is_kept_while_its_writer_may_run(url, monkeypatch):
    shards = Shards(directory_at(url) / "key", "key", 2)
    shards.write(torch.tensor([0]), -torch.ones(1, 2))
    unfinished, foreign = f".{'a' * 32}.tmp", "notes.txt"
    for name in (unfinished, foreign):
        shards.directory.filesystem.pipe_file(f"{shards.directory.path}/{name}", b"half")
    with shards.lock():
        assert shards.directory.leftovers() == [unfinished]
    shards.write(torch.tensor([1]), -torch.ones(1, 2))
    shards.directory.remove_leftovers()
    assert shards.directory.leftovers() == [unfinished]
    monkeypatch.setattr(atomic_files, "ABANDONED_AFTER", -1)
    shards.directory.remove_leftovers()
    assert shards.directory.leftovers() == []
    assert {name.rsplit("/", 1)[-1] for name in objects(url)} == {foreign, *shards.directory.files()}


@pytest.mark.parametrize("first", ["0", "f"])
def test_two_jobs_merge_at_the_same_time(url, monkeypatch, first):
    """Without locks, one may delete what the other has listed, but never the last value."""
    values = -torch.arange(1.0, 9.0).view(4, 2)
    jobs = [Shards(directory_at(url) / "key", "key", 4) for _ in range(2)]
    for row in range(4):
        jobs[0].write(torch.tensor([row]), values[row : row + 1])
    names = iter(["8" * 32, first * 32])  # of the second job, which is done first
    monkeypatch.setattr("fastdpo.storage.uuid4", lambda: type("", (), {"hex": next(names)}))
    filesystem, running = type(jobs[0].directory.filesystem), []
    pipe_file = filesystem.pipe_file

    def interrupted(self, path, data, **options):
        pipe_file(self, path, data, **options)
        if not running:
            running.append(path)
            jobs[1].merge(values)  # the first job has written its file, and not moved it

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "pipe_file", interrupted)
        jobs[0].merge(values)
    assert running
    assert torch.equal(jobs[0].read(), values)
    jobs[0].clean(values)
    assert torch.equal(jobs[0].read(), values)
    assert len(objects(url)) == 1


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_work(tmp_path, world):
    url, rows = f"file://{tmp_path}/cache", tokens(25)
    expected = exact(tiny_model(), rows)

    def work(_: int):
        passes.SECONDS_BETWEEN_SHARDS = 0.0
        return counted(tiny_model(), rows, url)

    for name, calls in (("first", -(-25 // world)), ("second", 0)):
        for logps, actual in ranks(world, tmp_path / name, work):
            assert actual == calls
            assert_close(logps, expected)
    assert len(objects(url)) == 1


def test_the_work_of_a_dead_rank_is_taken_over(tmp_path):
    """By a job of another size, which keeps what both ranks had stored."""
    rows, url = tokens(200), f"file://{tmp_path}/cache"
    killed = tmp_path / "killed"
    killed.mkdir()
    job = [start(rank_of, rank, 2, killed, lambda _: slowly(tiny_model(), rows, url, 0.01)) for rank in range(2)]
    while len(list(tmp_path.rglob("*.safetensors"))) < 6:
        time.sleep(0.01)
    for process in reversed(job):  # rank 1 first
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    missing = int((shards_of(url, 200).read()[:, 0] == MISSING).sum())
    assert 0 < missing < 200
    for logps, calls in ranks(3, tmp_path / "ranks", lambda _: counted(tiny_model(), rows, url)):
        assert calls == -(-missing // 3)
        assert_close(logps, exact(tiny_model(), rows))
    assert len(shards_of(url, 200).directory.files()) == 1  # without what a killed rank may have begun to write


@pytest.mark.parametrize("operation", ["makedirs", "ls", "pipe_file"])
def test_storage_that_refuses_costs_the_cache(monkeypatch, caplog, operation):
    """Also with an error of its own kind, such as for missing credentials."""

    class NoCredentials(Exception):
        pass

    def refuse(*_, **__):
        raise NoCredentials("no credentials")

    monkeypatch.setattr(MemoryFileSystem, operation, refuse)
    url = f"memory://{uuid4().hex}/cache"
    with caplog.at_level(logging.WARNING, logger="fastdpo"):
        logps, _ = counted(tiny_model(), ROWS, url)
    assert_close(logps, exact(tiny_model(), ROWS))
    (warning,) = [record.message for record in caplog.records]
    assert f"{url.replace('memory://', 'memory:///')}/" in warning
    assert "is not writable: NoCredentials: no credentials [cache-directory]" in warning


def test_files_of_other_processes_are_seen():
    path = f"{uuid4().hex}/key"
    shards = Shards(directory_at(f"bucket://{path}"), "key", 2)
    other = Shards(directory_at(f"memory://{path}"), "key", 2)  # the same objects, without kept listings
    for row in range(2):
        other.write(torch.tensor([row]), -torch.ones(1, 2))
        assert int((shards.read()[:, 0] != MISSING).sum()) == row + 1


@pytest.mark.parametrize(("url", "message"), [("nowhere://x", "nowhere"), ("s3://x/y", "s3fs")])
def test_urls_that_cannot_be_reached(monkeypatch, url, message):
    def missing(protocol):
        raise ImportError("Install s3fs to access S3") if protocol == "s3" else ValueError(f"not known: {protocol}")

    monkeypatch.setattr("fsspec.core.get_filesystem_class", missing)
    rule = f"cache_dir must be the path or URL of a directory, or None; got '{url}', which fsspec cannot reach: "
    with pytest.raises(ValueError, match=message) as error:
        ref_logps.precompute(tiny_model(), ROWS, cache_dir=url)
    assert str(error.value).startswith(f"precompute: {rule}")
    with pytest.raises(ValueError, match=message):
        checked_directory("patch", "reference_memory", url, "be")
    with pytest.raises(ValueError, match=message):
        fastdpo.patch("trl.DPOTrainer", reference_memory=url)
