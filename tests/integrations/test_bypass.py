"""A trainer whose class bypasses the patched functions says so, before its weights change."""

import pytest
import torch
from transformers import TrainerCallback
from trl import DPOTrainer

import fastdpo
from tests.contract.trainers.trl.dpo import OwnLoss
from tests.support.trl.dpo import assert_fused, build, tiny_model, train

UNUSED = "not fused, no call of the policy has reached fastdpo in the first step"


class OwnLossAndFusedReference(OwnLoss):
    def _compute_loss(self, model, inputs, return_outputs):
        reference, _ = self.compute_ref_log_probs(self.ref_model, inputs)
        if reference.isnan().any():
            return DPOTrainer._compute_loss(self, model, inputs, return_outputs)
        return super()._compute_loss(model, inputs, return_outputs)


class OwnInit(DPOTrainer):
    def __init__(self, model, args):
        self.own = True
        super(DPOTrainer, self).__init__(model=model, args=args)


def assert_untouched(model) -> None:
    assert model.config._attn_implementation == "sdpa"
    assert not any("fastdpo" in name for module in model.modules() for name in vars(module))


class FusedOnlyInEvaluation(OwnLoss):
    def _compute_loss(self, model, inputs, return_outputs):
        if not torch.is_grad_enabled():
            return DPOTrainer._compute_loss(self, model, inputs, return_outputs)
        return super()._compute_loss(model, inputs, return_outputs)


class Weights(TrainerCallback):
    """Notes the weights before each step."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.before = [x.detach().clone() for x in model.parameters()]


def test_a_trainer_that_skips_the_patched_init(tmp_path, caplog):
    fastdpo.patch("trl.DPOTrainer")
    model = tiny_model()
    args = build(tmp_path, tiny_model(), tiny_model(seed=1)).args
    assert "not fused" not in caplog.text
    OwnInit(model, args)
    assert caplog.text.count("trl.DPOTrainer (OwnInit): not fused, OwnInit does not call DPOTrainer.__init__") == 1
    assert_untouched(model)


@pytest.mark.parametrize("trainer_class", [OwnLossAndFusedReference, FusedOnlyInEvaluation])
def test_a_trainer_without_a_fused_call_says_so_in_its_first_step(tmp_path, caplog, trainer_class):
    with fastdpo.patched("trl.DPOTrainer"):
        assert_fused(train(tmp_path / "fused", tiny_model(), tiny_model(seed=1)), policy=3, reference=3)
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=trainer_class, max_steps=4)
        trainer.log({"by hand": 1.0})
        trainer.evaluate(trainer.train_dataset)
        assert "not fused" not in caplog.text
        trainer.train()
        name = trainer_class.__name__
        reason = f"trl.DPOTrainer ({name}): {UNUSED}; {name} overrides _compute_loss"
        assert caplog.text.count(reason) == caplog.text.count("not fused") == 1


RAISED = {
    # TRL would pad, and say that it does. fastdpo takes the option for the fused call, which such a class bypasses.
    "padding-free": (OwnLoss, dict(padding_free=True), "padding_free must be False, since its batches are padded"),
    "strict": (FusedOnlyInEvaluation, {}, UNUSED),
}


@pytest.mark.parametrize("case", RAISED)
def test_an_error_comes_before_a_weight_changes(tmp_path, monkeypatch, case):
    (trainer_class, options, message), weights = RAISED[case], Weights()
    if case == "strict":
        monkeypatch.setenv("FASTDPO_STRICT", "1")
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=trainer_class, **options)
        trainer.add_callback(weights)
        with pytest.raises(fastdpo.NotFused, match=message):
            trainer.train()
    assert all(map(torch.equal, trainer.model.parameters(), weights.before))
