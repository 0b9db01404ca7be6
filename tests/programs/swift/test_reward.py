"""ms-swift's RewardTrainer is a subclass of TRL's."""

from collections import Counter

import fastdpo
from tests.support.programs.swift_runs import train


def test_a_trainer_is_patched_once(tmp_path):
    """Its class is a subclass of TRL's, which has a line of its own."""
    before = Counter(fastdpo.calls)
    with fastdpo.patched("trl.RewardTrainer", "swift"):
        train(tmp_path, "rm")
    assert fastdpo.calls - before == {("swift.RewardTrainer", "policy", "fused"): 3}
