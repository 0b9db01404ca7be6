"""Patched training with the oldest supported TRL against patched training with the installed TRL.

Unpatched TRL 1.15 needs a GPU, so that no other comparison is possible on a CPU.
"""

from pathlib import Path

import pytest
import torch
import trl_worker
from trl_runs import Run, assert_fused, assert_same, run_with_oldest

CALLS = {
    "trl.DPOTrainer": dict(policy=3, reference=3 + 2, eval=2),
    "trl.KTOTrainer": dict(policy=6, reference=3 + 2, eval=4),
    "trl.SFTTrainer": dict(policy=3, eval=2),
    "trl.CPOTrainer": dict(policy=3, eval=2),
    "trl.ORPOTrainer": dict(policy=3, eval=2),
    "trl.GRPOTrainer": dict(policy=4, old_policy=2, reference=2 + 6, eval=2 * 6),
    "trl.RLOOTrainer": dict(policy=4, old_policy=2, reference=2 + 6, eval=2 * 6),
}


@pytest.mark.parametrize("trainer", CALLS)
def test_same_training(tmp_path, trainer):
    run_with_oldest(Path(trl_worker.__file__), tmp_path, trainer)
    result = torch.load(tmp_path / "run.pt")
    oldest = Run(**result["run"])
    assert result["version"] == "1.15.0"
    newest = trl_worker.patched_run(tmp_path / "newest", trainer)
    for run in (oldest, newest):
        assert_fused(run, **CALLS[trainer])
    assert_same(oldest, newest)
