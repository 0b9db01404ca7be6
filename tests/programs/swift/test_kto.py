"""ms-swift's KTOTrainer in this process, stock against patched."""

import pytest
from swift.rlhf_trainers.kto_trainer import KTOTrainer
from transformers import TrainerCallback

from fastdpo.integrations.swift import batches
from tests.support.comparison import assert_far_from_same
from tests.support.programs.swift_runs import (
    LORA,
    PACKING,
    join_rows,
    join_rows_and_scale_logits,
    scale_head,
    scale_logits,
    train_both,
    use_trainer,
)
from tests.support.trl.dpo import assert_fused, assert_same, assert_same_bits

FULL = dict(policy=6, reference=3)  # the completions and the KL term of 3 steps
LAYOUTS = {"padded": {}, "padding_free": dict(prepare=join_rows)}
OPTIONS = {
    "kto": ({}, FULL),
    "lora": (LORA, FULL),
    "weights": (dict(desirable_weight=2.0, undesirable_weight=0.5, beta=0.3), FULL),
    "apo_zero_unpaired": (dict(loss_type="apo_zero_unpaired"), dict(policy=3, reference=3)),
    "accumulation": (dict(gradient_accumulation_steps=3), dict(policy=18, reference=9)),
    "evaluation": (
        dict(split_dataset_ratio=0.34, eval_steps=3, per_device_eval_batch_size=4),
        dict(policy=6, reference=3 + 1, eval=1),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_option(tmp_path, name, layout):
    options, calls = OPTIONS[name]
    stock, patched = train_both(tmp_path, "kto", **options, **LAYOUTS[layout])
    assert_same(stock, patched)
    assert_fused(patched, **calls)


def test_packing(tmp_path):
    stock, patched = train_both(tmp_path, "kto", **PACKING, per_device_train_batch_size=2)
    assert_same(stock, patched)
    assert_fused(patched, **FULL)


@pytest.mark.parametrize("kind", ["completion_", "KL_completion_"])
def test_the_comparison_detects_a_missing_token(tmp_path, monkeypatch, kind):
    seen = []

    def without_a_token(batch, **options):
        inputs = batches.inputs_of(batch, **options)
        seen.append(inputs)
        if len(seen) % 2 != (kind == "completion_"):
            return inputs
        labels = inputs["labels"].clone()
        labels[:, :-3] = -100
        return {**inputs, "labels": labels}

    monkeypatch.setattr("fastdpo.integrations.swift.line.inputs_of", without_a_token)
    stock, patched = train_both(tmp_path, "kto")
    assert_far_from_same(stock, patched, stock.in_float64)


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


@pytest.mark.parametrize("prepare", [scale_logits, join_rows_and_scale_logits])
def test_a_model_that_is_not_fused_trains_as_in_stock(tmp_path, caplog, prepare):
    stock, patched = train_both(tmp_path, "kto", prepare=prepare)
    assert_same(stock, patched)
    assert {path for _, path in patched.calls} == {"stock"}
    assert caplog.text.count("swift.KTOTrainer (policy): not fused, the head has hooks") == 1


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
