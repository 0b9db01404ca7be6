"""ms-swift's CPOTrainer and ORPOTrainer in this process, stock against patched."""

import pytest
from swift.rlhf_trainers.cpo_trainer import CPOTrainer

from tests.support.comparison import assert_far_from_same
from tests.support.programs.swift_runs import LORA, forget_a_token, scale_logits, train_both, use_trainer
from tests.support.trl.dpo import assert_fused, assert_same, assert_same_bits

OPTIONS = {
    "cpo": ("cpo", {}),
    "cpo_hinge": ("cpo", dict(loss_type="hinge")),
    "cpo_ipo": ("cpo", dict(loss_type="ipo")),
    "cpo_without_nll": ("cpo", dict(cpo_alpha=0)),
    "cpo_lora": ("cpo", LORA),
    "simpo": ("simpo", {}),
    "simpo_with_nll": ("simpo", dict(cpo_alpha=0.5)),
    "simpo_lora": ("simpo", LORA),
    "orpo": ("orpo", {}),
    "orpo_lora": ("orpo", LORA),
}


def without_means_of_logits(run):
    """Stock averages them over prompts and padding, too."""
    run.logs = [{name: x for name, x in log.items() if "logits/" not in name} for log in run.logs]
    return run


def train_both_without_means_of_logits(directory, kind, **options):
    stock, patched = train_both(directory, kind, **options)
    assert [log.keys() for log in stock.logs] == [log.keys() for log in patched.logs]
    in_float64 = stock.in_float64
    stock.in_float64 = lambda: without_means_of_logits(in_float64())
    return without_means_of_logits(stock), without_means_of_logits(patched)


@pytest.mark.parametrize("name", OPTIONS)
def test_option(tmp_path, name):
    kind, options = OPTIONS[name]
    stock, patched = train_both_without_means_of_logits(tmp_path, kind, **options)
    assert_same(stock, patched)
    assert_fused(patched, policy=3)


@pytest.mark.parametrize("kind", ["cpo", "orpo"])
def test_evaluation(tmp_path, kind):
    options = dict(split_dataset_ratio=0.34, eval_steps=3, per_device_eval_batch_size=4)
    stock, patched = train_both_without_means_of_logits(tmp_path, kind, **options)
    assert_same(stock, patched)
    assert_fused(patched, policy=3, eval=1)


def test_means_of_logits_are_those_of_dpo(tmp_path):
    """In the first step, before the weights differ."""
    (tmp_path / "cpo").mkdir()
    _, cpo = train_both(tmp_path / "cpo", "cpo", max_steps=1)
    (tmp_path / "dpo").mkdir()
    dpo, _ = train_both(tmp_path / "dpo", "dpo", max_steps=1)
    for name in ("logits/chosen", "logits/rejected"):
        assert cpo.logs[0][name] == pytest.approx(dpo.logs[0][name], rel=1e-5)


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_the_comparison_detects_a_missing_token(tmp_path, monkeypatch, kind):
    forget_a_token(monkeypatch)
    stock, patched = train_both_without_means_of_logits(tmp_path, kind)
    assert_far_from_same(stock, patched, stock.in_float64)


@pytest.mark.parametrize("kind", ["cpo", "orpo"])
def test_a_model_that_is_not_fused_trains_as_in_stock(tmp_path, caplog, kind):
    stock, patched = train_both(tmp_path, kind, prepare=scale_logits)
    assert_same(stock, patched)
    assert patched.calls == {("policy", "stock"): 3}
    assert caplog.text.count(f"swift.{kind.upper()}Trainer (policy): not fused, the head has hooks") == 1


def test_a_subclass_that_may_read_logits_gets_them(tmp_path, monkeypatch, caplog):
    class ReadsLogits(CPOTrainer):
        def get_batch_loss_metrics(self, model, batch, train_eval="train"):
            loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
            logits = self.concatenated_forward(model, batch)[2]
            return loss, {**metrics, "largest": logits.amax().item()}

    use_trainer(monkeypatch, ReadsLogits)
    stock, patched = train_both(tmp_path, "cpo")
    assert_same_bits(stock, patched)
    reason = "ReadsLogits.get_batch_loss_metrics may read logits"
    assert caplog.text.count(f"swift.CPOTrainer (policy): not fused, {reason}") == 1
