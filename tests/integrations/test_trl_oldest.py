"""Patched training with the oldest supported TRL against patched training with the installed TRL.

Unpatched TRL 1.15 needs a GPU, so that no other comparison is possible on a CPU.
"""

from pathlib import Path

import pytest
import torch

from tests.support.trl.dpo import Run, assert_fused, assert_same, run_with_oldest
from tests.support.workers import trainings, vision

CALLS = {
    "trl.DPOTrainer": dict(policy=3, reference=3 + 2, eval=2),
    "trl.KTOTrainer": dict(policy=6, reference=3 + 2, eval=4),
    "trl.RewardTrainer": dict(policy=3, eval=2),
    "trl.SFTTrainer": dict(policy=3, eval=2),
    "trl.CPOTrainer": dict(policy=3, eval=2),
    "trl.ORPOTrainer": dict(policy=3, eval=2),
    "trl.GRPOTrainer": dict(policy=4, old_policy=2, reference=2 + 6, eval=2 * 6),
    "trl.RLOOTrainer": dict(policy=4, old_policy=2, reference=2 + 6, eval=2 * 6),
}


@pytest.fixture(scope="module")
def oldest(tmp_path_factory) -> Path:
    """A directory with the runs of one process."""
    directory = tmp_path_factory.mktemp("oldest")
    run_with_oldest(trainings, directory, *CALLS)
    return directory


@pytest.mark.parametrize("trainer", CALLS)
def test_same_training(oldest, tmp_path, trainer):
    newest = trainings.patched_run(tmp_path, trainer)
    assert_same_in_oldest(oldest / f"{trainer}.pt", newest, **CALLS[trainer])


def test_same_training_with_images(oldest, tmp_path):
    newest = vision.patched_run(tmp_path)
    assert_same_in_oldest(oldest / "images.pt", newest, policy=2, reference=3, eval=1)


def assert_same_in_oldest(saved: Path, newest: Run, **calls: int) -> None:
    result = torch.load(saved)
    oldest = Run(**result["run"])
    assert result["version"] == "1.15.0"
    for run in (oldest, newest):
        assert_fused(run, **calls)
    assert_same(oldest, newest)
