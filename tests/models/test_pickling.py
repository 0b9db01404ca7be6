"""A pickled model is a stock one, which loads without fastdpo, and the model that was pickled stays fused."""

import copy
import functools
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import TrainerCallback
from trl import DPOTrainer, RewardTrainer

import fastdpo
from fastdpo.models.identity.functions import module_of
from fastdpo.models.state import state_of
from tests.support.comparison import assert_trained_alike
from tests.support.models.families import HYBRID, kind
from tests.support.trl.dpo import LORA, tiny_model, train, trained_adapter
from tests.support.trl.reward import reward_model, train_reward

IDS = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def loaded(data: bytes) -> nn.Module:
    return torch.load(io.BytesIO(data), weights_only=False)


def needs_fastdpo(model: nn.Module) -> bool:
    """Whether a process needs fastdpo to load a model: a pickle has the names of all that it refers to."""
    return any(b"fastdpo" in data for data in (pickle.dumps(model), saved(model)))


def logits(model: nn.Module) -> torch.Tensor:
    was_training, _ = model.training, model.eval()
    with torch.no_grad():
        found = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits
    model.train(was_training)
    return found


def attributes(model: nn.Module) -> list[tuple]:
    return [
        (name, sorted(vars(x).keys() - {"forward"}), [*x._forward_hooks], [*x._forward_pre_hooks])
        for name, x in model.named_modules()
    ]


def given_by_fastdpo(model: nn.Module) -> set[str]:
    """The names of what fastdpo has set on the modules of a model."""
    return {
        name
        for module in model.modules()
        for name, x in vars(module).items()
        if module_of(x).startswith("fastdpo.") or type(x).__module__.startswith("fastdpo.")
    }


class Pickle(TrainerCallback):
    """Pickles the model after each step."""

    def __init__(self):
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.needs_fastdpo: list[bool] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.needs_fastdpo += map(needs_fastdpo, (model, nn.Sequential(model)))
        self.found += [(logits(each(model)), logits(model)) for each in WAYS.values()]


WAYS = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "torch.save": lambda x: loaded(saved(x))}


def full(directory, name="llama", **options):
    models = (tiny_model(kind(name), seed, **(HYBRID[name][1] if name in HYBRID else {})) for seed in (0, 1))
    policy, reference = models
    return policy, train(directory, policy, reference, **options)


def lora(directory, **options):
    policy = tiny_model()
    return policy, train(directory, policy, None, peft_config=LoraConfig(**LORA), **options)


def reward(directory, **options):
    model = reward_model()
    return model, train_reward(directory, model, **options)


TRAININGS = {
    "full": (full, dict(policy=3, reference=3)),
    "hybrid": (lambda *args, **options: full(*args, name="lfm2", **options), dict(policy=3, reference=3)),
    "LoRA": (lora, dict(policy=3, reference=3)),
    "reward": (reward, dict(policy=3, eval=6)),  # its logits are fused
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_model_that_is_pickled_while_it_trains(tmp_path, name):
    run, calls = TRAININGS[name]
    _, stock = run(tmp_path)
    pickled = Pickle()

    class Pickled(RewardTrainer if name == "reward" else DPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(pickled)

    with fastdpo.patched():
        model, patched = run(tmp_path, trainer_class=Pickled)
        assert state_of(model) is not None
        clean = [attributes(each(model)) for each in WAYS.values()]
    assert_trained_alike((stock, patched), **calls)
    assert pickled.needs_fastdpo == [False] * 6
    assert len(pickled.found) == 6
    for pair in pickled.found:
        torch.testing.assert_close(*pair)
    assert all(x == attributes(model) for x in clean), "what it is after unpatching"


class InTheStep(DPOTrainer):
    """Pickles and copies its model around each loss."""

    found: list[set[str]]

    def compute_loss(self, model, *args, **kwargs):
        self.take(model)
        loss = super().compute_loss(model, *args, **kwargs)
        self.take(model)
        return loss

    def take(self, model):
        with getattr(model, "disable_adapter", nullcontext)():
            self.take_now(model)
        self.take_now(model)

    def take_now(self, model):
        self.found += [given_by_fastdpo(each(model)) for each in WAYS.values()]
        self.found.append(given_by_fastdpo(copy.deepcopy(model)) - KEPT_IN_COPIES)


KEPT_IN_COPIES = {"forward", "_fastdpo_forward", "__reduce_ex__"}


@pytest.mark.parametrize("name", ["full", "hybrid", "LoRA"])
def test_a_model_that_is_pickled_and_copied_within_a_step(tmp_path, name, monkeypatch):
    run, _ = TRAININGS[name]
    monkeypatch.setattr(InTheStep, "found", [], raising=False)
    _, stock = run(tmp_path, max_steps=1)
    with fastdpo.patched():
        _, patched = run(tmp_path, trainer_class=InTheStep, max_steps=1)
    assert_trained_alike((stock, patched), policy=1, reference=1)
    assert InTheStep.found == [set()] * 12


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_model_that_is_pickled_before_its_backward(name):
    """In which checkpointing runs its layers again."""
    model = fastdpo.prepare(tiny_model(kind(name), **(HYBRID[name][1] if name in HYBRID else {})))
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    model.disable_input_require_grads()  # a local function
    model.train()

    def gradients(pickles):
        sums = fastdpo.score(model, IDS, torch.ones_like(IDS), IDS).sums()
        if pickles:
            assert not needs_fastdpo(model)
        return torch.autograd.grad(sums.sum(), [*model.parameters()])

    for x, y in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(x, y)
    assert fastdpo.calls["fastdpo.score", "policy", "fused"] >= 2


def test_a_copy_and_a_head_are_pickled_too(tmp_path):
    with fastdpo.patched():
        model, _ = full(tmp_path, max_steps=1)
        copied = copy.deepcopy(model)
        assert state_of(copied) is not None
        assert state_of(copied) is not state_of(model)
        assert torch.equal(logits(loaded(saved(copied))), logits(model))
        assert torch.equal(pickle.loads(pickle.dumps(model.lm_head)).weight, model.lm_head.weight)


WRAPPERS = {"adapters": trained_adapter, "compiled": functools.partial(torch.compile, backend="eager")}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_copy_of_a_wrapper_is_one(wrapper):
    """The wrapper has the attributes of the model inside."""
    model = fastdpo.prepare(WRAPPERS[wrapper](tiny_model()))
    copied = copy.deepcopy(model)
    assert type(copied) is type(model)
    assert [*copied.state_dict()] == [*model.state_dict()]
    scored = [fastdpo.score(x, IDS, torch.ones_like(IDS), IDS).sums() for x in (model, fastdpo.prepare(copied))]
    assert torch.equal(*scored)
