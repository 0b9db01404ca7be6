"""RewardTrainer of TRL 0.29 to 1.14, stock against patched."""

import pytest

from tests.contract.trainers.trl.reward import OPTIONS
from tests.support.comparison import assert_trained_alike
from tests.support.trl.reward import train_both_rewards


@pytest.mark.parametrize("option", ["explicit_prompts", "margins", "centered", "evaluation", "adapter", "accumulation"])
def test_option(tmp_path, option):
    options, calls = OPTIONS[option]
    assert_trained_alike(train_both_rewards(tmp_path, **options), **calls)
