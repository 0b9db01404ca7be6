"""RewardTrainer of TRL 0.29 to 1.14, stock against patched."""

import pytest

from tests.contract.trainers.trl.reward import OPTIONS
from tests.support.trl.dpo import assert_fused, assert_same
from tests.support.trl.reward import train_both_rewards


@pytest.mark.parametrize("option", ["explicit_prompts", "margins", "centered", "evaluation", "adapter", "accumulation"])
def test_option(tmp_path, option):
    options, calls = OPTIONS[option]
    stock, patched = train_both_rewards(tmp_path, **options)
    assert_fused(patched, **calls)
    assert_same(stock, patched)
