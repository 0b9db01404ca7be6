"""A budget of tokens in the RewardTrainer of TRL < 0.29."""

import pytest

from tests.support.comparison import assert_trained_alike
from tests.support.trl.dpo import long_pairs
from tests.support.trl.reward import train_both_rewards


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4)])
def test_steps_that_are_cut(tmp_path, sizes):
    options = dict(zip(("per_device_train_batch_size", "gradient_accumulation_steps"), sizes, strict=True))
    runs = train_both_rewards(tmp_path, data=long_pairs(), max_tokens=130, max_steps=2, **options)
    assert_trained_alike(runs, policy=2 * 4)
