"""ms-swift's RewardTrainer in one process, stock against patched."""

from collections import Counter

import pytest

import fastdpo
from tests.support.programs.swift_runs import LORA, train, train_both
from tests.support.trl.dpo import assert_fused, assert_same

# option: (changed arguments, number of calls)
OPTIONS = {
    "centered": (dict(center_rewards_coefficient=0.3), 3),
    "accumulation": (dict(gradient_accumulation_steps=2), 5),  # an epoch has 3 batches
    "adapter": (LORA, 3),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(tmp_path, option):
    options, calls = OPTIONS[option]
    stock, patched = train_both(tmp_path, "rm", **options)
    assert_fused(patched, policy=calls)
    assert_same(stock, patched)


def test_a_trainer_is_patched_once(tmp_path):
    """Its class is a subclass of TRL's, which has a line of its own."""
    before = Counter(fastdpo.calls)
    with fastdpo.patched("trl.RewardTrainer", "swift"):
        train(tmp_path, "rm")
    assert fastdpo.calls - before == {("swift.RewardTrainer", "policy", "fused"): 3}
