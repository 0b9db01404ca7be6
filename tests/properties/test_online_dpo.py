"""Online DPO with a reward model: the patched training equals stock."""

from trl_online_runs import assert_all_same, reward_model, train_three
from trl_runs import assert_fused


def test_online_training_equals_stock(tmp_path):
    runs = train_three(tmp_path, rewards=reward_model)
    assert_fused(runs[-1], policy=3, reference=3)
    assert_all_same(*runs)
