"""A model is changed between two steps: the training goes on as stock training does, fused or with a logged reason."""

import logging
from collections import Counter

import pytest
import torch
from peft import LoraConfig
from surgeries import SURGERIES
from torch import nn
from transformers import TrainerCallback
from trl import DPOTrainer
from trl_runs import LORA, assert_same, pairs, tiny_model, train

import fastdpo
from fastdpo.models import probe

STEPS = 4
BEFORE = 2  # steps before the surgery


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    fastdpo.unpatch()


class Operate(TrainerCallback):
    def __init__(self, operate):
        self.operate = operate

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == BEFORE:
            self.operate(model)


def operated(operate) -> type[DPOTrainer]:
    class Operated(DPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(Operate(operate))

    return Operated


@pytest.mark.parametrize("surgery", SURGERIES, ids=lambda surgery: surgery.operate.__name__)
def test_surgery(tmp_path, caplog, surgery):
    def options() -> dict:
        torch.manual_seed(3)
        given = (
            dict(peft_config=LoraConfig(**LORA), reference=None)
            if surgery.adapter
            else dict(reference=tiny_model(seed=1))
        )
        return dict(model=tiny_model(), trainer_class=operated(surgery.operate), max_steps=STEPS, **given)

    stock = train(tmp_path / "stock", **options())
    with caplog.at_level(logging.WARNING, "fastdpo"), fastdpo.patched("trl.DPOTrainer"):
        patched = train(tmp_path / "patched", **options())
    assert_same(stock, patched)
    said = [record.message for record in caplog.records if record.name == "fastdpo"]
    if surgery.reason is None:
        assert said == []
        assert patched.calls == Counter({("policy", "fused"): STEPS, ("reference", "fused"): STEPS})
    else:
        (line,) = said[:1]
        assert line.startswith(f"trl.DPOTrainer (policy): not fused, {surgery.reason}")
        assert patched.calls["policy", "fused"] == BEFORE
        assert patched.calls["policy", "stock"] == STEPS - BEFORE


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_that_trainers_switch_is_examined_once(tmp_path, monkeypatch, adapter):
    """With gradient checkpointing, TRL disables and enables it in each step, and adds a hook each time."""
    examined, stock_probe = [], probe.probe
    # Counted where it is called: with checkpointing, the calls of a model don't tell a probe from a batch.
    monkeypatch.setattr(probe, "probe", lambda model, device: examined.append(model) or stock_probe(model, device))
    given = dict(peft_config=LoraConfig(**LORA), reference=None) if adapter else dict(reference=tiny_model(seed=1))
    with fastdpo.patched("trl.DPOTrainer", reference_memory=True):
        epochs = dict(data=pairs(8), max_steps=-1, num_train_epochs=3, evaluate=4, eval_strategy="epoch")
        run = train(tmp_path, tiny_model(), gradient_checkpointing=True, **epochs, **given)
    assert len(examined) == (1 if adapter else 2)
    assert run.calls["reference", "remembered"] == 2 * 2 + 3, "an epoch has two batches, an evaluation one"


class Observed(nn.Module):
    """Scales by the largest activation that it has seen in training, as quantization-aware training does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return x / self.largest


def test_a_model_that_keeps_statistics_is_left_to_stock(both, caplog):
    def observing(model):
        model.model.layers[0].mlp.act_fn = Observed()
        return model

    stock, patched = both(prepare=observing)
    assert_same(stock, patched)
    assert patched.calls["policy", "stock"] == 3
    assert "running LlamaForCausalLM writes to its buffers: model.layers.0.mlp.act_fn.largest" in caplog.text
