"""Options of TRL's DPOTrainer whose effect is seen in numbers as well: a margin, a metric, the reference."""

from datasets import Dataset
from trl.trainer import dpo_trainer

import fastdpo
from tests.support.comparison import assert_trained_alike
from tests.support.trl.dpo import assert_fused, assert_same, pairs, tiny_model, train


def test_precompute_without_a_reference_model(tmp_path):
    with fastdpo.patched():
        run = train(tmp_path, tiny_model(), None, precompute_ref_log_probs=True)
    assert_fused(run, policy=3, reference=1)  # computed with the policy, but counted as reference
    assert run.logs[0]["rewards/margins"] == 0.0


def test_streaming(both):
    stream = Dataset.from_list(pairs(16)).to_iterable_dataset()
    assert_trained_alike(both(data=stream), policy=3, reference=3)


def test_compute_metrics_receives_logits_of_the_ordinary_forward(both):
    seen = []

    def compute_metrics(prediction) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"mean_logit": float(prediction.predictions.mean())}

    stock, patched = both(evaluate=4, compute_metrics=compute_metrics)
    assert_same(stock, patched)
    fused = hasattr(dpo_trainer, "add_fused_lm_head")  # TRL before 1.15 has no call for the logits alone
    evaluation = {("eval", "fused"): 1, ("reference", "fused"): 3 + 1} if fused else {("eval", "stock"): 1}
    assert patched.calls == {("policy", "fused"): 3, ("reference", "fused"): 3, **evaluation}
    assert any("eval_mean_logit" in log for log in patched.logs)
    assert seen[0].shape == seen[1].shape == (8, seen[0].shape[1], 97)


def test_token_accuracy_above_zero(both):
    """Random answers are never predicted; an accuracy of 0 would hide errors."""
    data = [dict(prompt=f"w{i} w2 ", chosen="w7 w7 w7", rejected=f"w{i} w8 w9 w8") for i in range(16)]
    patched = assert_trained_alike(both(data=data, loss_type=["sft"], learning_rate=0.2), policy=3, reference=3)
    assert patched.logs[2]["mean_token_accuracy"] > 0.2


def test_reference_follows_the_policy(both, tmp_path):
    synced = dict(sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6, max_steps=4)
    stock, patched = both(**synced)
    assert_trained_alike((stock, patched), policy=4, reference=4)
    fixed = train(tmp_path / "fixed", tiny_model(seed=0), tiny_model(seed=1), max_steps=4)
    moved = [abs(stock.logs[i]["rewards/margins"] - fixed.logs[i]["rewards/margins"]) > 1e-3 for i in range(4)]
    assert moved == [False, False, True, True]


def test_a_reference_equal_to_the_policy_gives_a_margin_of_zero(tmp_path):
    synced = dict(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0, max_steps=2)
    with fastdpo.patched():
        run = train(tmp_path, tiny_model(seed=0), tiny_model(seed=1), **synced)
    assert [run.logs[i]["rewards/margins"] == 0 for i in range(2)] == [False, True]
