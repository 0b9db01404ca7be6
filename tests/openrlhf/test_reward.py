"""What OpenRLHF's RewardModelTrainer does to its model: normalized rewards, ring attention."""

import functools

import pytest
from openrlhf_runs import RecordedRewards, Strategy, assert_same, checkpoint, train_rewards

import fastdpo
from tests.contract.trainers.openrlhf import reward as description


@pytest.fixture
def both(tmp_path):
    return functools.partial(description.both, tmp_path)


class Normalized(RecordedRewards):
    """In evaluations, its model returns other numbers than its head."""

    def __init__(self, model, *args, **kwargs):
        model.normalize_reward = True
        model.mean.fill_(0.5)
        model.std.fill_(2.0)
        super().__init__(model, *args, **kwargs)


def test_normalized_rewards_fall_back_where_they_are_normalized(both, caplog):
    """OpenRLHF normalizes them in evaluation mode only."""
    stock, patched = both(trainer_class=Normalized, evaluate=6)
    assert_same(stock, patched)
    assert patched.calls == {("policy", "fused"): 3, ("eval", "stock"): 2}
    assert caplog.text.count("RewardModel computes other scores") == caplog.text.count("not fused") == 1


def test_ring_attention_falls_back(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Strategy, "ring_attn_group", "a group")
    with fastdpo.patched("openrlhf"):
        patched = train_rewards(checkpoint(tmp_path), Strategy())
    assert patched.calls == {("policy", "stock"): 3}
    assert "ring attention" in caplog.text
