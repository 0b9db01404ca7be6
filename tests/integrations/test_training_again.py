"""A trainer trains again with another model, and after another trainer has prepared its model."""

import copy
import functools

import pytest
import torch
from transformers import TrainerCallback
from trl import DPOTrainer

import fastdpo
from fastdpo.models.running import pace
from tests.contract.harness import each, harnesses
from tests.support.trl.dpo import build, tiny_model

OF_TRL = functools.partial(each, lambda harness: harness.build and harness.name.startswith("trl."))


def losses(trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def begin_with(trainer, model) -> None:
    trainer.model = trainer.model_wrapped = model
    trainer.optimizer = trainer.lr_scheduler = None


def by_hand(trainer, models) -> None:
    """Trains, and then again with the model of the beginning."""
    trainer.train()
    begin_with(trainer, models[0])
    fastdpo.calls.clear()
    trainer.train()


def by_model_init(trainer, models) -> None:
    """Trains twice, each time with a model that a function makes."""
    trainer.model_init = lambda: copy.deepcopy(models[0])
    trainer.train()
    fastdpo.calls.clear()
    trainer.train()


def with_another_reference(trainer, models) -> None:
    if getattr(trainer, "ref_model", None) is not None:
        trainer.train()
        trainer.ref_model = models[1]
    fastdpo.calls.clear()
    trainer.train()


def evaluated_before(trainer, models) -> None:
    """Another model is evaluated before it is trained."""
    begin_with(trainer, models[0])
    trainer.eval_dataset = trainer.train_dataset
    fastdpo.calls.clear()
    trainer.evaluate()
    assert not any(path == "stock" for _, _, path in fastdpo.calls)
    trainer.train()


@pytest.mark.parametrize("again", [by_hand, by_model_init, with_another_reference, evaluated_before])
@OF_TRL()
def test_another_model_is_fused(harness, again, tmp_path, caplog):
    if again is evaluated_before and harness.name in ("trl.OnlineDPOTrainer", "trl.A2POTrainer"):
        pytest.skip("its evaluation generates only")

    def run(side):
        torch.manual_seed(0)
        trainer = harness.build(tmp_path / side, *harness.models(), **harness.one_step)
        models = [copy.deepcopy(x) for x in (trainer.model, getattr(trainer, "ref_model", None)) if x is not None]
        torch.manual_seed(0)
        again(trainer, models)
        return losses(trainer), dict(fastdpo.calls)

    stock, _ = run("stock")
    with fastdpo.patched(harness.name):
        patched, calls = run("patched")
    assert patched == pytest.approx(stock, rel=2e-3, abs=2e-4)
    assert {(name, path) for name, _, path in calls} == {(harness.name, "fused")}
    assert any(kind == "policy" for _, kind, _ in calls)
    assert "not fused" not in caplog.text


PAIRS = [
    ("trl.GRPOTrainer", "trl.OnlineDPOTrainer"),
    ("trl.OnlineDPOTrainer", "trl.RLOOTrainer"),
    ("trl.DPOTrainer", "trl.CPOTrainer"),
    ("trl.ORPOTrainer", "trl.KTOTrainer"),
    ("trl.GRPOTrainer", "trl.RLOOTrainer"),
    ("trl.TPOTrainer", "trl.A2POTrainer"),
    ("trl.CPOTrainer", "trl.CPOTrainer"),
]
GENERATING = {f"trl.{name}Trainer" for name in ("GRPO", "RLOO", "OnlineDPO", "A2PO")}
DESCRIBED = {harness.name: harness for harness in harnesses()}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_trainers_take_turns_on_one_policy(names, bf16, tmp_path, caplog, monkeypatch):
    """Each is the one that trains fused when it trains, whichever was created last."""
    monkeypatch.setenv("FASTDPO_STRICT", "1")

    def run(side):
        torch.manual_seed(0)
        model, *_ = DESCRIBED[names[1]].models()
        trainers = []
        for i, name in enumerate(names):
            _, *others = DESCRIBED[name].models()
            options = dict(DESCRIBED[name].one_step, bf16=bf16)
            trainers.append(DESCRIBED[name].build(tmp_path / side / str(i), model, *others, **options))
        counted = []
        for i in (0, 1, 0):
            trainers[i].optimizer = trainers[i].lr_scheduler = None
            fastdpo.calls.clear()
            torch.manual_seed(0)
            trainers[i].train()
            counted.append({(name, path) for name, _, path in fastdpo.calls})
        return [losses(trainer) for trainer in trainers], counted

    stock, _ = run("stock")
    with fastdpo.patched(*names):
        patched, counted = run("patched")
    tolerance = 3e-2 if bf16 else 2e-3
    for a, b in zip(patched, stock, strict=True):
        if not (bf16 and GENERATING & {*names}):  # rounding then chooses other tokens
            assert a == pytest.approx(b, rel=tolerance, abs=tolerance / 10)
    assert counted == [{(names[i], "fused")} for i in (0, 1, 0)]


def test_a_trainer_gets_its_model_back_from_one_that_trains_in_a_callback(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")

    class Inner(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 1:
                inner = DESCRIBED["trl.CPOTrainer"].build(tmp_path / "inner", model, max_steps=1, learning_rate=0.0)
                inner.train()

    def run(side):
        trainer = build(tmp_path / side, tiny_model(), tiny_model(seed=1), callbacks=[Inner()], max_steps=3)
        trainer.train()
        return losses(trainer)

    stock = run("stock")
    with fastdpo.patched("trl.DPOTrainer", "trl.CPOTrainer"):
        patched = run("patched")
    assert patched == pytest.approx(stock, rel=2e-3, abs=2e-4)
    assert fastdpo.calls["trl.DPOTrainer", "policy", "fused"] == 3
    assert {(name, path) for name, _, path in fastdpo.calls} == {
        ("trl.DPOTrainer", "fused"),
        ("trl.CPOTrainer", "fused"),
    }


class Zeroth(DPOTrainer):
    """Takes losses without gradients."""

    context, mode = torch.no_grad, True

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train(self.mode)
        inputs = self._prepare_inputs(inputs)
        with self.context():
            loss = self.compute_loss(model, inputs)
        for x in model.parameters():
            x.grad = torch.full_like(x, 1e-3) * loss.item()
        return loss.detach().clone()


class Evaluating(Zeroth):
    """As MeZO does."""

    context, mode = torch.inference_mode, False


class Both(Zeroth):
    """A step with gradients follows."""

    def training_step(self, *args, **kwargs):
        super().training_step(*args, **kwargs)
        return DPOTrainer.training_step(self, *args, **kwargs)


@pytest.mark.parametrize("trainer_class", [Zeroth, Evaluating, Both])
def test_losses_without_gradients_are_calls(trainer_class, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")

    def run(side):
        models = tiny_model(), tiny_model(seed=1)
        trainer = build(tmp_path / side, *models, trainer_class=trainer_class, max_steps=2, eval_strategy="no")
        trainer.train()
        return losses(trainer)

    stock = run("stock")
    fastdpo.calls.clear()
    with fastdpo.patched("trl.DPOTrainer"):
        assert run("patched") == pytest.approx(stock, rel=2e-3, abs=2e-4)
    assert {path for _, _, path in fastdpo.calls} == {"fused"}


class OwnCall(Zeroth):
    """Trains by a call of its own, next to one for its metrics."""

    def compute_loss(self, model, inputs, **kwargs):
        if torch.is_grad_enabled():
            return model(inputs["input_ids"], labels=inputs["input_ids"]).loss
        return super().compute_loss(model, inputs, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        super().training_step(model, inputs)
        return DPOTrainer.training_step(self, model, inputs, num_items_in_batch)


def test_a_training_by_calls_of_its_own_says_so_each_time(tmp_path, caplog):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), trainer_class=OwnCall, max_steps=2)
        for trainings in (1, 2):
            trainer.train()
            assert caplog.text.count("[no-call]") == trainings


class Failing(TrainerCallback):
    """Ends a training in its second step, at one of its events."""

    def __init__(self, event, error):
        def fail(args, state, control, **kwargs):
            if state.global_step == 1:
                raise error

        setattr(self, event, fail)


@pytest.mark.parametrize(
    ("event", "error"),
    [("on_step_begin", ValueError), ("on_pre_optimizer_step", KeyboardInterrupt), ("on_optimizer_step", RuntimeError)],
)
def test_steps_are_counted_after_a_training_that_an_error_has_ended(event, error, tmp_path):
    with fastdpo.patched("trl.DPOTrainer"):
        trainer = build(tmp_path, tiny_model(), tiny_model(seed=1), callbacks=[Failing(event, error)], max_steps=9)
        with pytest.raises(error):
            trainer.train()
    done, optimizer = pace.training().done, torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for _ in range(3):
        optimizer.step()
    assert pace.training().left is None
    assert pace.training().done == done + 3


@pytest.mark.parametrize("mode", ["evaluate", "train"])
@pytest.mark.parametrize("name", ["trl.DPOTrainer", "trl.RewardTrainer"])
def test_a_model_that_was_not_finite_is_fused_with_sound_weights(name, mode, tmp_path, caplog):
    harness = DESCRIBED[name]
    with fastdpo.patched(name):
        trainer = harness.build(tmp_path, *harness.models(), **harness.one_step)
        weights = copy.deepcopy(trainer.model.state_dict())
        trainer.eval_dataset = trainer.train_dataset
        with torch.no_grad():
            trainer.model.get_input_embeddings().weight.fill_(torch.nan)
        getattr(trainer, mode)()
        assert caplog.text.count("[not-finite]") == 1
        trainer.model.load_state_dict(weights)
        for x in trainer.optimizer.state.values() if trainer.optimizer else ():
            x.clear()
        fastdpo.calls.clear()
        getattr(trainer, mode)()
    assert {path for _, _, path in fastdpo.calls} == {"fused"}
    assert caplog.text.count("[not-finite]") == 1
