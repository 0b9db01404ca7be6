"""`fastdpo run` patches the trainers of these versions in a script that does not name fastdpo."""

from tests.support.programs.run_scripts import assert_trains_fused


def test_a_script_trains_fused(tmp_path):
    assert_trains_fused(tmp_path, "trl.DPOTrainer", "trl.OnlineDPOTrainer", "trl.RewardTrainer")
