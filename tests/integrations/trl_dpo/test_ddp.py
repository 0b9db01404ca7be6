"""Two gloo processes with half of the data each compute the gradients of one with all data."""

from pathlib import Path

import torch

from tests.support.comparison import assert_same_gradients
from tests.support.workers import ddp
from tests.support.workers.processes import run_ranks


def run(directory: Path, ranks: int, batch: int) -> list[dict]:
    run_ranks(ranks, ddp.train_rank, directory, batch)
    return [torch.load(directory / f"rank{rank}of{ranks}.pt") for rank in range(ranks)]


def test_gradients_equal_those_of_one_process(tmp_path):
    first, second = run(tmp_path / "two", ranks=2, batch=2)
    (alone,) = run(tmp_path / "one", ranks=1, batch=4)

    assert (first["world"], first["wrapped"]) == (2, "DistributedDataParallel")
    assert first["lengths"] != second["lengths"], "each rank must have different data"
    for rank in (first, second, alone):
        assert rank["calls"] == {
            ("trl.DPOTrainer", "policy", "fused"): 2,
            ("trl.DPOTrainer", "reference", "fused"): 2,
        }
        assert len(rank["gradients"]) == 2
    assert_same_gradients(alone["gradients"], first["gradients"])
    for a, b in zip(first["gradients"], second["gradients"], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), f"{name} differs between the ranks"
