"""References and subclasses of ms-swift's KTOTrainer in this process, stock against patched."""

import pytest
from swift.rlhf_trainers.kto_trainer import KTOTrainer
from transformers import TrainerCallback

from tests.support.programs.swift_runs import join_rows, scale_head, train_both, use_trainer
from tests.support.trl.dpo import assert_fused, assert_same, assert_same_bits

LAYOUTS = {"padded": {}, "padding_free": dict(prepare=join_rows)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reference_that_is_altered_while_training(tmp_path, caplog, layout):
    def scale_reference_after_one_step(trainer):
        class ScaleReference(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    scale_head(trainer.ref_model)

        trainer.add_callback(ScaleReference())

    stock, patched = train_both(tmp_path, "kto", before_training=scale_reference_after_one_step, **LAYOUTS[layout])
    assert_same(stock, patched)
    assert patched.calls["reference", "fused"] == 1
    assert caplog.text.count("swift.KTOTrainer (reference): not fused, the head has hooks") == 1


def test_a_subclass_with_its_own_KL_term_calls_the_reference_twice(tmp_path, monkeypatch):
    class WithItsOwnTerm(KTOTrainer):
        def _compute_kl_logps(self, model, batch):
            return 0.9 * super()._compute_kl_logps(model, batch)

    use_trainer(monkeypatch, WithItsOwnTerm)
    stock, patched = train_both(tmp_path, "kto")
    assert_same(stock, patched)
    assert_fused(patched, policy=6, reference=6)


def test_a_subclass_that_may_read_logits_gets_them(tmp_path, monkeypatch, caplog):
    class ReadsLogits(KTOTrainer):
        def get_batch_logps(self, inputs, logits, labels):
            logps, sums = super().get_batch_logps(inputs, logits, labels)
            return logps, sums + logits.amax()

    use_trainer(monkeypatch, ReadsLogits)
    stock, patched = train_both(tmp_path, "kto")
    assert_same_bits(stock, patched)
    reason = "ReadsLogits.get_batch_logps may read logits"
    assert caplog.text.count(f"swift.KTOTrainer (policy): not fused, {reason}") == 1
