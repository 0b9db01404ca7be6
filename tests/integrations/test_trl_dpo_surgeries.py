"""What users do to a model between two steps: the training goes on as stock's does, fused or for a reason not."""

import logging
from collections import Counter

import pytest
import torch
from peft import LoraConfig
from surgeries import SURGERIES
from transformers import TrainerCallback
from trl import DPOTrainer
from trl_runs import LORA, assert_same, tiny_model, train

import fastdpo

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
