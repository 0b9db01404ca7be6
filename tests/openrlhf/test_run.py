"""`fastdpo run` patches OpenRLHF's trainers in a script that does not name fastdpo."""

from pathlib import Path

from tests.support.programs.run_scripts import assert_trains_fused

HERE = Path(__file__).parent


def test_a_script_trains_fused(tmp_path):
    trainers = "openrlhf.DPOTrainer", "openrlhf.RewardModelTrainer"
    assert_trains_fused(tmp_path, *trainers, path=(HERE, HERE / "stand_ins"))
