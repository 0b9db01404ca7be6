"""`fastdpo run` patches the trainers of these versions in scripts that do not name fastdpo."""

import pytest

from tests.support.programs.run_scripts import assert_trains_fused


@pytest.mark.parametrize("trainer", ["trl.DPOTrainer", "trl.OnlineDPOTrainer", "trl.RewardTrainer"])
def test_a_script_trains_fused(trainer, tmp_path):
    assert_trains_fused(tmp_path, trainer)
