"""Logits in ms-swift's CPOTrainer: their means, and a subclass that reads them."""

import pytest
from swift.rlhf_trainers.cpo_trainer import CPOTrainer

from tests.support.programs.swift_runs import train_both, use_trainer
from tests.support.trl.dpo import assert_same_bits


def test_means_of_logits_are_those_of_dpo(tmp_path):
    """In the first step, before the weights differ."""
    (tmp_path / "cpo").mkdir()
    _, cpo = train_both(tmp_path / "cpo", "cpo", max_steps=1)
    (tmp_path / "dpo").mkdir()
    dpo, _ = train_both(tmp_path / "dpo", "dpo", max_steps=1)
    for name in ("logits/chosen", "logits/rejected"):
        assert cpo.logs[0][name] == pytest.approx(dpo.logs[0][name], rel=1e-5)


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
