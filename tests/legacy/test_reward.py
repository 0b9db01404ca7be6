"""A budget of tokens in the RewardTrainer of TRL < 0.29."""

import pytest

import fastdpo
from tests.support.trl.reward import (
    reward_model,
    train_reward,
)


def test_a_budget_of_tokens_is_refused(tmp_path):
    refused = pytest.raises(NotImplementedError, match=r"^patch: max_tokens does not support .* before version 5")
    with fastdpo.patched("trl.RewardTrainer", max_tokens=100), refused:
        train_reward(tmp_path, reward_model())
