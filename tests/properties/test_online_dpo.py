"""Online DPO with a reward model: the patched training equals stock."""

from tests.support.trl.dpo import assert_fused
from tests.support.trl.online import assert_all_same, reward_model, train_three


def test_online_training_equals_stock(tmp_path):
    runs = train_three(tmp_path, rewards=reward_model)
    assert_fused(runs[-1], policy=3, reference=3, reward=3)
    assert_all_same(*runs)
