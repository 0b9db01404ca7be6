"""Two ranks of each trainer log and train what they do in stock."""

import torch

from tests.contract.harness import each
from tests.support.comparison import assert_fused
from tests.support.workers import two_ranks
from tests.support.workers.processes import run_ranks


@each(lambda harness: harness.ranks)
def test_two_ranks_equal_stock(harness, tmp_path):
    run_ranks(2, two_ranks.train_rank, tmp_path, harness.name)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    for runs in ranks:
        assert_fused(runs[-1], **harness.ranks[1])
        harness.assert_same(*runs)
    first, second = (runs[-1].gradients for runs in ranks)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a), "DDP averages them"
