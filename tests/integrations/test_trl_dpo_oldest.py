"""Patched training with the oldest supported TRL against patched training with the installed TRL.

Unpatched TRL 1.15 needs a GPU, so that no other comparison is possible on a CPU.
"""

from pathlib import Path

import torch
from trl_runs import Run, assert_fused, assert_same, run_with_oldest, tiny_model, train

import fastdpo

WORKER = Path(__file__).parents[1] / "support" / "trl_worker.py"


def test_same_training(tmp_path):
    run_with_oldest(WORKER, tmp_path, "trl.DPOTrainer")
    result = torch.load(tmp_path / "run.pt")
    oldest = Run(**result["run"])
    assert result["version"] == "1.15.0"
    with fastdpo.patched("trl.DPOTrainer"):
        newest = train(tmp_path / "newest", tiny_model(seed=0), tiny_model(seed=1), evaluate=6)
    for run in (oldest, newest):
        assert_fused(run, policy=3, reference=3 + 2, eval=2)
    assert_same(oldest, newest)
