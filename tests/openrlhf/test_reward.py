"""OpenRLHF's RewardModelTrainer with its real model and dataset: patched equals stock."""

import pytest
from openrlhf_runs import RecordedRewards, Strategy, assert_same, checkpoint, train_rewards

import fastdpo
from tests.support.comparison import double
from tests.support.trl.verified import assert_scores_verified

FUSED = {("policy", "fused"): 3}
ADAPTER = dict(lora_rank=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def both(tmp_path):
    """A function that trains stock, then patched, from the same initial weights.

    `model` are fields of the arguments' namespace of this name.
    """

    def run(kind="llama", packing=False, tiny=None, model=None, **options):
        path = checkpoint(tmp_path, kind, **(tiny or {}))
        stock = train_rewards(path, Strategy(packing, **(model or {})), **options)
        stock.in_float64 = lambda: train_rewards(path, Strategy(packing, **(model or {})), cast=double, **options)
        assert not stock.calls
        with fastdpo.patched("openrlhf"):
            return stock, train_rewards(path, Strategy(packing, **(model or {})), **options)

    return run


OPTIONS = {
    "as it is": dict(),
    "margins": dict(model=dict(margin_loss_enable=True)),
    "logexp": dict(loss="logexp", model=dict(compute_fp32_loss_enable=True)),
    "adapter": ADAPTER,
    "another head": dict(value_head_prefix="value"),
    "padding that is the end": dict(padding="<eos>"),
    "checkpointing": dict(checkpointing=True),
    "absolute positions": dict(kind="gpt2", tiny=dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)),
    "router": dict(kind="mixtral", tiny=dict(num_local_experts=4, num_experts_per_tok=2)),
}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packing_samples"])
@pytest.mark.parametrize("option", OPTIONS)
def test_option(both, option, packing):
    stock, patched = both(packing=packing, **OPTIONS[option])
    assert_same(stock, patched)
    assert patched.calls == FUSED


def test_evaluation(both):
    stock, patched = both(evaluate=6)
    assert_same(stock, patched)
    assert patched.calls == {**FUSED, ("eval", "fused"): 2}
    assert any("reward_std" in log for log in stock.logs)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packing_samples"])
def test_verifying(tmp_path, monkeypatch, caplog, packing):
    path = checkpoint(tmp_path)

    def train(name):
        train_rewards(path, Strategy(packing), evaluate=6)

    assert_scores_verified(train, "openrlhf.RewardModelTrainer", monkeypatch, caplog)


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


class OwnForward(RecordedRewards):
    def concatenated_forward(self, model, *batch):
        ids, mask = self.concatenated_inputs(*batch)
        return *model(ids, attention_mask=mask).chunk(2), []


def test_a_trainer_that_calls_its_model_by_itself(both, caplog):
    stock, patched = both(trainer_class=OwnForward)
    assert_same(stock, patched)
    assert not patched.calls
    reason = "OwnForward.concatenated_forward does not call RewardModelTrainer.concatenated_forward"
    assert caplog.text.count(reason) == caplog.text.count("not fused") == 1
