"""Models changed between two steps: training equals stock, fused or with a logged reason."""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import TrainerCallback

import fastdpo
from fastdpo.models.examine import probe
from tests.support.models import surgeries
from tests.support.models.surgeries import SURGERIES
from tests.support.recorded_calls import recorded_calls
from tests.support.trl.dpo import LORA, assert_same, pairs, tiny_model, train

STEPS = 4
BEFORE = 2  # steps before the surgery


class Operate(TrainerCallback):
    def __init__(self, operate):
        self.operate = operate

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == BEFORE:
            self.operate(model)


def sides(adapter: bool) -> dict:
    """The reference of a training: the policy without its adapter, or another model."""
    return dict(peft_config=LoraConfig(**LORA), reference=None) if adapter else dict(reference=tiny_model(seed=1))


@pytest.fixture
def trained(tmp_path, caplog):
    """A function that trains stock and patched with a callback that is made of both models, and returns the patched run
    and what was logged.
    """

    def train_both(callback: Callable[..., TrainerCallback], adapter: bool, steps: int = STEPS):
        runs = []
        for patch in (contextlib.nullcontext(), fastdpo.patched("trl.DPOTrainer")):
            torch.manual_seed(3)
            policy, of_side = tiny_model(), sides(adapter)
            callbacks = [callback(policy, of_side["reference"])]
            with caplog.at_level(logging.WARNING, "fastdpo"), patch:
                runs.append(train(tmp_path, policy, callbacks=callbacks, max_steps=steps, **of_side))
        assert_same(*runs)
        return runs[1], [record.message for record in caplog.records if record.name == "fastdpo"]

    return train_both


@pytest.mark.parametrize("surgery", SURGERIES, ids=lambda surgery: surgery.operate.__name__)
def test_surgery(trained, surgery):
    patched, messages = trained(lambda *_: Operate(surgery.operate), surgery.adapter)
    if surgery.reason is None:
        assert messages == []
        assert patched.calls == Counter({("policy", "fused"): STEPS, ("reference", "fused"): STEPS})
    else:
        assert messages[0].startswith(f"fastdpo: trl.DPOTrainer (policy): not fused, {surgery.reason}")
        assert patched.calls["policy", "fused"] == BEFORE
        assert patched.calls["policy", "stock"] == STEPS - BEFORE


class OperateAfterThePolicy(TrainerCallback):
    """Changes a policy with adapters after its call of a step, before it is called as its own reference."""

    def __init__(self, operate):
        self.operate = operate

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == BEFORE:

            def once(module, args, output):
                hook.remove()
                self.operate(module.get_base_model())

            hook = model.register_forward_hook(once)


PACKED_STATES = "the packed hidden states of LlamaForCausalLM differ"
BETWEEN = {
    surgeries.layer_written_to_modules: PACKED_STATES,
    surgeries.forward_written_to_attributes: "hooks on its modules",
    surgeries.hooks_written_to_attributes: "hooks on its modules",
    surgeries.layer_of_another_class: PACKED_STATES,
}


@pytest.mark.parametrize("operate", BETWEEN, ids=lambda operate: operate.__name__)
def test_surgery_between_the_calls_of_policy_and_reference(trained, operate):
    patched, messages = trained(lambda *_: OperateAfterThePolicy(operate), adapter=True)
    assert any(f"not fused, {BETWEEN[operate]}" in message for message in messages)
    fused = {("policy", "fused"): BEFORE + 1, ("reference", "fused"): BEFORE}  # with the call before the change
    assert patched.calls == fused | {("policy", "stock"): STEPS - BEFORE - 1, ("reference", "stock"): STEPS - BEFORE}


class Toggle(TrainerCallback):
    """Hooks a layer of a model and removes the hook, twice."""

    def __init__(self, model):
        self.layer = model.model.layers[0].mlp

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (1, 3):
            self.layer.register_forward_hook(lambda module, args, output: output.roll(1, 1))
        elif state.global_step in (2, 4):
            self.layer._forward_hooks.clear()


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_that_changes_and_changes_back(trained, adapter):
    """Each side is named once when its calls fall back, and once when they are fused again."""
    patched, messages = trained(lambda policy, reference: Toggle(reference or policy), adapter, steps=5)
    roles = ("policy", "reference") if adapter else ("reference",)
    toggled = {(role, path): n for role in roles for path, n in (("fused", 3), ("stock", 2))}
    assert patched.calls == {("policy", "fused"): 5, ("reference", "fused"): 5} | toggled
    expected = [f"fastdpo: trl.DPOTrainer ({x}): not fused, hooks on its modules" for x in roles]
    expected += [f"fastdpo: trl.DPOTrainer ({x}): fused again" for x in roles]
    assert [x[: len(start)] for x, start in zip(messages, expected, strict=True)] == expected


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_whose_checkpointing_is_toggled_is_probed_once_in_each_mode(tmp_path, monkeypatch, adapter):
    """TRL disables and enables gradient checkpointing in each step, and adds a hook each time."""
    # With checkpointing, the calls of a model do not tell a probe from a batch: count probes.
    probed = recorded_calls(monkeypatch, probe, "probe")
    with fastdpo.patched("trl.DPOTrainer"):
        epochs = dict(data=pairs(8), max_steps=-1, num_train_epochs=3, evaluate=4, eval_strategy="epoch")
        train(tmp_path, tiny_model(), gradient_checkpointing=True, **epochs, **sides(adapter))
    assert len(probed) == (2 if adapter else 3), "the policy in training and in evaluation, and the reference"


class Observed(nn.Module):
    """Divides by the largest activation of the training, as quantization-aware training does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return x / self.largest


def test_a_model_that_keeps_statistics_falls_back_to_stock(both, caplog):
    def observing(model):
        model.model.layers[0].mlp.act_fn = Observed()
        return model

    stock, patched = both(prepare=observing)
    assert_same(stock, patched)
    assert patched.calls["policy", "stock"] == 3
    assert "running LlamaForCausalLM changes what its modules keep: model.layers.0.mlp.act_fn.largest" in caplog.text
