"""Two gloo processes, stock and patched, of trainers whose metrics TRL's own code gathers."""

import pytest
import torch

from tests.support.trl.dpo import Run, assert_fused, assert_same
from tests.support.workers import two_ranks
from tests.support.workers.processes import run_ranks

CALLS = {
    "trl.KTOTrainer": dict(policy=2 * 3, reference=3 + 1, eval=2),
    "trl.RewardTrainer": dict(policy=3, eval=1),
    "trl.SFTTrainer": dict(policy=3, eval=1),
    "trl.CPOTrainer": dict(policy=3, eval=1),
    "trl.ORPOTrainer": dict(policy=3, eval=1),
    "trl.TPOTrainer": dict(policy=3, eval=1),
}
OTHERWISE_DEFINED = {"trl.CPOTrainer": "logits/", "trl.ORPOTrainer": "logits/"}


@pytest.mark.parametrize("trainer", CALLS)
def test_two_ranks_equal_stock(tmp_path, trainer):
    runs = {}
    for kind in ("stock", "patched"):
        run_ranks(2, two_ranks.train_rank, tmp_path / kind, kind, trainer)
        runs[kind] = [Run(**torch.load(tmp_path / kind / f"rank{rank}.pt")) for rank in range(2)]
    for stock, patched in zip(runs["stock"], runs["patched"], strict=True):
        assert not stock.calls
        assert_fused(patched, **CALLS[trainer])
        for log in (*stock.logs, *patched.logs):
            for name in [x for x in log if OTHERWISE_DEFINED.get(trainer, "-") in x]:
                del log[name]
        assert_same(stock, patched)
    first, second = (run.gradients for run in runs["patched"])
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a), "DDP averages them"
