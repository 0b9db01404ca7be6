"""A trainer whose class bypasses the patched functions says so, at the latest in its first log."""

import copy
import functools

import pytest
import torch
from trl import DPOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer

import fastdpo
from fastdpo.integrations.bypass import bypass_reason
from tests.support.trl.dpo import assert_fused, assert_same_bits, build, tiny_model, train, train_both
from tests.support.trl.online import build as build_online
from tests.support.trl.online import writer

UNUSED = "not fused, no call of the policy has reached fastdpo before the first log"


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


@pytest.mark.parametrize("options", [{}, dict(precompute_ref_log_probs=True), dict(padding_free=True)])
def test_an_override_that_calls_nothing_leaves_the_trainer_unpatched(tmp_path, caplog, options):
    stock, patched = train_both(tmp_path, trainer_class=OwnLoss, **options)
    assert_same_bits(stock, patched)
    assert not patched.calls
    reason = "trl.DPOTrainer (OwnLoss): not fused, OwnLoss._compute_loss does not call DPOTrainer._compute_loss"
    assert caplog.text.count(reason) == caplog.text.count("not fused") == 1


def test_its_models_stay_untouched(tmp_path):
    model, reference = tiny_model(), tiny_model(seed=1)
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, model, reference, trainer_class=OwnLoss)
        trainer.train()
        assert_untouched(model)
        assert_untouched(reference)
    assert not any("fastdpo" in name for name in vars(trainer))


def test_a_trainer_that_skips_the_patched_init(tmp_path, caplog):
    fastdpo.patch("trl.DPOTrainer")
    model = tiny_model()
    args = build(tmp_path, tiny_model(), tiny_model(seed=1)).args
    assert "not fused" not in caplog.text
    OwnInit(model, args)
    assert caplog.text.count("trl.DPOTrainer (OwnInit): not fused, OwnInit does not call DPOTrainer.__init__") == 1
    assert_untouched(model)


@pytest.mark.parametrize("trainer_class", [OwnLossIfTraining, OwnLossAndFusedReference])
def test_a_trainer_without_a_fused_call_says_so_in_its_first_log(tmp_path, caplog, trainer_class):
    with fastdpo.patched("trl.DPOTrainer"):
        assert_fused(train(tmp_path / "fused", tiny_model(), tiny_model(seed=1)), policy=3, reference=3)
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=trainer_class, max_steps=4)
        trainer.log({"by hand": 1.0})
        assert "not fused" not in caplog.text
        trainer.train()
        name = trainer_class.__name__
        assert caplog.text.count(f"trl.DPOTrainer ({name}): {UNUSED}") == caplog.text.count("not fused") == 1


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


@pytest.mark.parametrize(
    ("trainer_class", "message"), [(OwnLoss, "does not call DPOTrainer._compute_loss"), (OwnLossIfTraining, UNUSED)]
)
def test_strict(tmp_path, monkeypatch, trainer_class, message):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with fastdpo.patched("trl.DPOTrainer"), pytest.raises(fastdpo.NotFused, match=message):
        train(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=trainer_class)


def test_online(tmp_path, caplog):
    class Own(OnlineDPOTrainer):
        def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None):
            logits = model(torch.cat([prompt_ids, completion_ids], 1)).logits[:, prompt_ids.shape[1] - 1 : -1]
            return logits.log_softmax(-1).gather(2, completion_ids[..., None])[..., 0]

    class OwnIfTraining(Own):
        def _forward(self, model, *inputs):
            return Own._forward(self, model, *inputs) if model else OnlineDPOTrainer._forward(self, model, *inputs)

    with fastdpo.patched("trl.OnlineDPOTrainer"):
        model = writer(0)
        build_online(tmp_path / "own", model, writer(1), Own)
        assert "(Own): not fused, Own._forward does not call OnlineDPOTrainer._forward" in caplog.text
        assert_untouched(model)
        build_online(tmp_path / "hesitating", writer(0), writer(1), OwnIfTraining).train()
    assert caplog.text.count("not fused") == 2


class Stock:
    def loss(self):
        return self.score()

    def score(self):
        return 1.0


KEPT = Stock.score


def decorated(function):
    def wrapper(self):
        return function(self)

    return wrapper


def helper(self):
    return Stock.score(self)


class BySuper(Stock):
    def score(self):
        return 2 * super().score()


class ByMethod(Stock):
    def score(self):
        return self.scaled()

    def scaled(self):
        return 2 * super().score()


class ByFunction(Stock):
    def score(self):
        return helper(self)


class ByKeptFunction(Stock):
    def score(self):
        return 2 * KEPT(self)


class Decorated(Stock):
    @decorated
    def score(self):
        return super().score()


class Partial(Stock):
    score = functools.partialmethod(Stock.score)


class OuterCallsInner(Stock):
    def loss(self):
        return 2 * self.score()


class OuterCallsModel(Stock):
    def loss(self):
        return {"fused": True}


class OwnScore(Stock):
    def score(self):
        return sum([1.0])


class BelowOwnScore(OwnScore):
    def score(self):
        return super().score()


class InNamedArgument(Stock):
    def score(self):
        return dict(fused=True)


CALLS = [BySuper, ByMethod, ByFunction, ByKeptFunction, Decorated, Partial, OuterCallsInner, OuterCallsModel]
CALLS += [InNamedArgument, Stock]


@pytest.mark.parametrize("kind", CALLS)
def test_classes_that_are_trusted(kind):
    assert bypass_reason(kind(), Stock, ("loss", "score", "fused")) is None


@pytest.mark.parametrize("kind", [OwnScore, BelowOwnScore])
def test_classes_that_are_not(kind):
    reason = bypass_reason(kind(), Stock, ("loss", "score", "fused"))
    assert reason == "OwnScore.score does not call Stock.score"


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
