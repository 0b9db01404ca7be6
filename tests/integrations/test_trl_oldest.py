"""Patched training with the oldest supported TRL against patched training with the installed TRL.

Unpatched TRL 1.15 needs a GPU, so that no other comparison is possible on a CPU.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import trl_vision_worker
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
    assert_same_in_oldest(tmp_path, trl_worker, trainer, **CALLS[trainer])


def test_same_training_with_images(tmp_path):
    assert_same_in_oldest(tmp_path, trl_vision_worker, "trl.DPOTrainer", policy=2, reference=3, eval=1)


def assert_same_in_oldest(directory: Path, worker: ModuleType, trainer: str, **calls: int) -> None:
    run_with_oldest(Path(worker.__file__), directory, trainer)
    result = torch.load(directory / "run.pt")
    oldest = Run(**result["run"])
    assert result["version"] == "1.15.0"
    newest = worker.patched_run(directory / "newest", trainer)
    for run in (oldest, newest):
        assert_fused(run, **calls)
    assert_same(oldest, newest)
