"""Patched training with the oldest supported TRL against patched training with the installed TRL.

Unpatched TRL 1.15 needs a GPU, so that no other comparison is possible on a CPU.
"""

from pathlib import Path

import pytest
import torch

from tests.support.documents import trained
from tests.support.trl.dpo import Run, assert_fused, assert_same
from tests.support.trl.online import OnlineRun, assert_all_same
from tests.support.workers import budgets, trainings, vision
from tests.support.workers.packages import packages, run_with

CALLS = {
    **{f"trl.{x}Trainer": dict(policy=3, reference=3 + 2, eval=2) for x in ("DPO", "A2PO")},
    "trl.KTOTrainer": dict(policy=6, reference=3 + 2, eval=4),
    **{f"trl.{x}Trainer": dict(policy=3, eval=2) for x in ("Reward", "SFT", "CPO", "ORPO", "TPO")},
    **{x: dict(policy=4, old_policy=2, reference=2 + 6, eval=2 * 6) for x in budgets.GROUPS},
}


@pytest.fixture(scope="module")
def oldest(tmp_path_factory) -> Path:
    """A directory with the runs of one process, which imports the oldest supported TRL."""
    directory = tmp_path_factory.mktemp("oldest")
    run_with("OLDEST_TRL", trainings.__name__, directory, *CALLS)
    for trainer in (*CALLS, "trl.OnlineDPOTrainer"):
        trained.add(trainer, packages("OLDEST_TRL").name.removeprefix("trl-"))
    return directory


def runs_in(path: Path, kind: type[Run] = Run) -> list[Run]:
    result = torch.load(path)
    assert result["version"] == "1.15.0"
    return [kind(**run) for run in result["runs"]]


@pytest.mark.parametrize("trainer", CALLS)
def test_same_training(oldest, tmp_path, trainer):
    newest = trainings.patched_run(tmp_path, trainer)
    assert_same_in_oldest(oldest / f"{trainer}.pt", newest, **CALLS[trainer])


def test_same_training_with_images(oldest, tmp_path):
    newest = vision.patched_run(tmp_path)
    assert_same_in_oldest(oldest / "images.pt", newest, policy=2, reference=3, eval=1)


def test_online_training(oldest):
    """Unpatched OnlineDPOTrainer needs no GPU."""
    runs = runs_in(oldest / "online.pt", OnlineRun)
    assert_fused(runs[-1], policy=3, reference=3)
    assert_all_same(*runs)


def assert_same_in_oldest(saved: Path, newest: Run, **calls: int) -> None:
    (oldest,) = runs_in(saved)
    for run in (oldest, newest):
        assert_fused(run, **calls)
    assert_same(oldest, newest)


@pytest.mark.parametrize("trainer", budgets.TRAINERS)
def test_steps_that_are_cut(oldest, trainer):
    drawn, cut = runs_in(oldest / f"{trainer} cut.pt")
    assert {path for _, path in cut.calls} == {"fused"}
    assert cut.calls["policy", "fused"] < drawn.calls["policy", "fused"]
    assert_same(drawn, cut)
