"""A trainer whose class bypasses the patched functions says so, before its weights change."""

import copy

import pytest
import torch
from transformers import TrainerCallback
from trl import DPOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer

import fastdpo
from tests.support.trl.dpo import assert_fused, assert_same_bits, build, tiny_model, train, train_both
from tests.support.trl.online import build as build_online
from tests.support.trl.online import writer

UNUSED = "not fused, no call of the policy has reached fastdpo in the first step"


def loss_from_logits(model, inputs: dict) -> torch.Tensor:
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).loss


class OwnLoss(DPOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        return loss_from_logits(model, inputs)


class OwnLossIfTraining(DPOTrainer):
    """Its code names the function that it overrides, which no training calls."""

    def _compute_loss(self, model, inputs, return_outputs):
        if not model.training:
            return super()._compute_loss(model, inputs, return_outputs)
        return loss_from_logits(model, inputs)


class OwnLossAndFusedReference(DPOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        reference, _ = self.compute_ref_log_probs(self.ref_model, inputs)
        if reference.isnan().any():
            return super()._compute_loss(model, inputs, return_outputs)
        return loss_from_logits(model, inputs)


class OwnInit(DPOTrainer):
    def __init__(self, model, args):
        self.own = True
        super(DPOTrainer, self).__init__(model=model, args=args)


def assert_untouched(model) -> None:
    assert model.config._attn_implementation == "sdpa"
    assert not any("fastdpo" in name for module in model.modules() for name in vars(module))


class FusedOnlyInEvaluation(DPOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        if not torch.is_grad_enabled():
            return super()._compute_loss(model, inputs, return_outputs)
        return loss_from_logits(model, inputs)


class Weights(TrainerCallback):
    """Notes the weights before each step."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.before = [x.detach().clone() for x in model.parameters()]


@pytest.mark.parametrize("options", [{}, dict(precompute_ref_log_probs=True)])
def test_an_override_that_calls_nothing_trains_as_stock_does(tmp_path, caplog, options):
    stock, patched = train_both(tmp_path, trainer_class=OwnLoss, **options)
    assert_same_bits(stock, patched)
    assert ("policy", "fused") not in patched.calls
    reason = f"trl.DPOTrainer (OwnLoss): {UNUSED}; OwnLoss overrides _compute_loss"
    assert caplog.text.count(reason) == caplog.text.count("not fused") == 1


def test_a_trainer_that_skips_the_patched_init(tmp_path, caplog):
    fastdpo.patch("trl.DPOTrainer")
    model = tiny_model()
    args = build(tmp_path, tiny_model(), tiny_model(seed=1)).args
    assert "not fused" not in caplog.text
    OwnInit(model, args)
    assert caplog.text.count("trl.DPOTrainer (OwnInit): not fused, OwnInit does not call DPOTrainer.__init__") == 1
    assert_untouched(model)


@pytest.mark.parametrize("trainer_class", [OwnLossIfTraining, OwnLossAndFusedReference, FusedOnlyInEvaluation])
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


def test_padding_free_is_refused_before_a_weight_changes(tmp_path):
    """TRL would pad, and say that it does. fastdpo takes the option for the fused call, which such a class bypasses."""
    weights = Weights()
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=OwnLoss, padding_free=True)
        trainer.add_callback(weights)
        with pytest.raises(fastdpo.NotFused, match="padding_free must be False, since its batches are padded"):
            trainer.train()
    assert all(map(torch.equal, trainer.model.parameters(), weights.before))


def test_no_warning_after_unpatching(tmp_path, caplog):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=OwnLossIfTraining)
    trainer.train()
    assert "not fused" not in caplog.text


def test_a_fallback_with_a_reason_does_not_warn_again(tmp_path, caplog):
    with fastdpo.patched("trl.DPOTrainer"):
        models = [tiny_model(seed=seed) for seed in range(2)]
        for model in models:
            model.lm_head.register_forward_hook(lambda module, inputs, output: output)
        run = train(tmp_path, *models)
    assert run.calls == {("policy", "stock"): 3, ("reference", "stock"): 3}
    assert caplog.text.count("not fused") == 2
    assert UNUSED not in caplog.text


def test_strict_raises_before_a_weight_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    weights = Weights()
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=OwnLossIfTraining)
        trainer.add_callback(weights)
        with pytest.raises(fastdpo.NotFused, match=UNUSED):
            trainer.train()
    assert all(map(torch.equal, trainer.model.parameters(), weights.before))


def test_online(tmp_path, caplog):
    class Own(OnlineDPOTrainer):
        def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None):
            logits = model(torch.cat([prompt_ids, completion_ids], 1)).logits[:, prompt_ids.shape[1] - 1 : -1]
            return logits.log_softmax(-1).gather(2, completion_ids[..., None])[..., 0]

    with fastdpo.patched("trl.OnlineDPOTrainer"):
        build_online(tmp_path, writer(0), writer(1), Own).train()
    assert caplog.text.count(f"(Own): {UNUSED}; Own overrides _forward") == caplog.text.count("not fused") == 1


def test_a_copied_trainer_says_only_that_its_models_are_copies(tmp_path, caplog):
    fastdpo.patch("trl.DPOTrainer")
    trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), 8, max_steps=1)
    with caplog.at_level("INFO", logger="fastdpo"):
        copy.deepcopy(trainer).train()
        assert caplog.text.count("the model is a copy of a patched model") == 2  # policy and reference
        assert UNUSED not in caplog.text
        caplog.clear()
        trainer.train()
    assert caplog.text.count("trl.DPOTrainer calls: ") == 2  # at its first log and at its end
    assert "not fused" not in caplog.text
