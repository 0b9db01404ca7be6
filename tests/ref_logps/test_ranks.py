"""Several ranks share the work, with or without a shared file system."""

import os
import signal
import time

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import fastdpo
from fastdpo import ref_logps
from fastdpo.ref_logps import keys
from fastdpo.ref_logps.shards import MISSING, Shards
from tests.support.models.sharded import sharded
from tests.support.ref_logps import assert_close, exact, rank_of, ranks, slowly, start, tokens
from tests.support.trl.dpo import tiny_model


def counted(*args, **options) -> tuple[ref_logps.RefLogps, int]:
    before = fastdpo.calls.copy()
    logps = ref_logps.precompute(*args, **options)
    return logps, (fastdpo.calls - before).total()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("disks", ["none", "shared", "own"])
def test_ranks_share_the_work(tmp_path, world, disks):
    rows = tokens(25)
    caches = {"none": lambda _: None, "shared": lambda _: tmp_path / "c", "own": lambda rank: tmp_path / f"c{rank}"}

    def work(rank: int):
        return counted(tiny_model(), rows, cache_dir=caches[disks](rank), tokens_per_batch=1)

    expected = exact(tiny_model(), rows)
    results = ranks(world, tmp_path / "first", work)
    for logps, calls in results:
        assert calls == -(-25 // world), "every rank makes the same number of calls"
        assert torch.equal(logps.chosen, results[0][0].chosen)
        assert_close(logps, expected)
    for logps, calls in ranks(world, tmp_path / "second", work):
        assert calls == (-(-25 // world) if disks == "none" else 0)
        assert_close(logps, expected)


def test_ranks_without_data(tmp_path):
    rows = tokens(3)
    for logps, calls in ranks(3, tmp_path, lambda _: counted(tiny_model(), rows)):
        assert calls == 1
        assert_close(logps, exact(tiny_model(), rows))
    for logps, calls in ranks(2, tmp_path, lambda _: counted(tiny_model(), [])):
        assert (len(logps.chosen), calls) == (0, 0)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_engines_whose_forward_passes_are_collective(tmp_path, engine):
    """A rank that made fewer calls would block the other, so the number of batches is odd."""
    rows = tokens(8)

    def work(_: int):
        model = tiny_model()
        model.register_buffer("unused", torch.zeros(1))  # DDP broadcasts buffers in each forward
        model = DistributedDataParallel(model) if engine == "ddp" else sharded(model)
        return counted(model, rows, cache_dir=tmp_path / "cache", tokens_per_batch=1)

    for logps, calls in ranks(2, tmp_path / "ranks", work):
        assert calls == 4
        assert_close(logps, exact(tiny_model(), rows))


def test_a_killed_job_is_resumed_by_a_job_of_another_size(tmp_path):
    rows, cache = tokens(200), tmp_path / "cache"
    killed = tmp_path / "killed"
    killed.mkdir()
    job = [start(rank_of, rank, 2, killed, lambda _: slowly(tiny_model(), rows, cache, 0.01)) for rank in range(2)]
    while len(list(cache.rglob("*.safetensors"))) < 6:
        time.sleep(0.01)
    for process in job:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    (directory,) = cache.iterdir()
    missing = int((Shards(directory, directory.name, 200).read()[:, 0] == MISSING).sum())
    assert missing < 200

    results = ranks(3, tmp_path / "ranks", lambda _: counted(tiny_model(), rows, cache_dir=cache, tokens_per_batch=1))
    assert len(list(cache.rglob("*.safetensors"))) == 1
    for logps, calls in results:
        assert calls == -(-missing // 3)
        assert_close(logps, exact(tiny_model(), rows))


def test_an_error_on_one_rank_is_raised_on_all(tmp_path):
    """A corrupt file that only one rank reads must not block the others."""
    rows = tokens(4)

    def work(rank: int):
        return ref_logps.precompute(tiny_model(), rows, cache_dir=tmp_path / f"cache{rank}")

    ranks(2, tmp_path / "first", work)
    (path,) = (tmp_path / "cache0").rglob("*.safetensors")
    path.write_bytes(b"corrupt")
    for message in ranks(2, tmp_path / "second", work):
        assert f"{path} must be a whole safetensors file" in message


@pytest.mark.parametrize("argument", ["model", "dataset", "tokens_per_batch", "cache_dir"])
def test_arguments_must_be_the_same_on_every_rank(tmp_path, argument):
    def work(rank: int):
        model = tiny_model(seed=rank if argument == "model" else 0)
        rows = tokens(4, seed=rank if argument == "dataset" else 0)
        cache = None if argument == "cache_dir" and rank == 0 else tmp_path / "cache"
        budget = 100 + rank if argument == "tokens_per_batch" else 100
        return ref_logps.precompute(model, rows, cache_dir=cache, tokens_per_batch=budget)

    for message in ranks(2, tmp_path / "ranks", work):
        assert "must be the same on every rank" in message


def test_the_key_depends_on_the_precision_of_fsdp_but_not_on_sharding(tmp_path):
    def work(_: int):
        digests = []
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
            digests.append(keys.model_digest(sharded(tiny_model(), mp_policy=policy)))
        return digests

    for same, other in ranks(2, tmp_path, work):
        assert same == keys.model_digest(tiny_model())
        assert other != same
