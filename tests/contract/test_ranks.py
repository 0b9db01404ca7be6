"""Two ranks of each trainer log and train what they do in stock."""

from pathlib import Path

import torch

from tests.contract.harness import Harness, each
from tests.support.comparison import assert_fused
from tests.support.workers import two_ranks
from tests.support.workers.processes import run_ranks


def train(directory: Path, harness: Harness, by_clock: bool) -> list:
    """The patched runs of both ranks, which have trained what stock has, and the same."""
    run_ranks(2, two_ranks.train_rank, directory, harness.name, by_clock)
    ranks = [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    for runs in ranks:
        harness.assert_same(*runs)
    patched = [runs[-1] for runs in ranks]
    for a, b in zip(*(run.gradients for run in patched), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a), "DDP averages them"
    return patched


@each(lambda harness: harness.ranks)
def test_two_ranks_equal_stock(harness, tmp_path):
    for run in train(tmp_path, harness, by_clock=False):
        assert_fused(run, **harness.ranks[1])


WITH_A_CLOCK = tuple(f"trl.{x}Trainer" for x in ("DPO", "SFT", "GRPO"))
"""Trainers with a reference, without one, and with a policy of an earlier step: ranks vote alike in all of them."""


@each(lambda harness: harness.ranks and harness.name in WITH_A_CLOCK)
def test_two_ranks_for_which_a_clock_finds_to_pay(harness, tmp_path):
    """They replay graphs, and compile layers in the same step."""
    for run in train(tmp_path, harness, by_clock=True):
        assert "replayed" in {path for _, path in run.calls}
