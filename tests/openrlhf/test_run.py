"""`fastdpo run` patches OpenRLHF's trainers in scripts that do not name fastdpo."""

from pathlib import Path

import pytest

from tests.support.programs.run_scripts import assert_trains_fused

HERE = Path(__file__).parent


@pytest.mark.parametrize("trainer", ["openrlhf.DPOTrainer", "openrlhf.RewardModelTrainer"])
def test_a_script_trains_fused(tmp_path, trainer):
    assert_trains_fused(tmp_path, trainer, path=(HERE, HERE / "stand_ins"))
