"""CUDA graphs: the same training by replays of recordings, here on the CPU (see `recorder`)."""

import json
import logging

import pytest
import torch
from transformers import TrainerCallback

import fastdpo
from fastdpo.integrations.training_events import DECIDED
from fastdpo.models.running import compiled, pace
from tests.support.comparison import assert_same_in_low_precision
from tests.support.copies import set_newer
from tests.support.kernels import recorder as recording
from tests.support.trl.dpo import DPO, adapter, assert_same, tiny_model


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    return recording.install(monkeypatch)


OPTIONS = {
    "full": {},
    "LoRA": adapter(),
    "checkpointing": dict(gradient_checkpointing=True),
    "autocast": dict(bf16=True),
    "accumulation": dict(gradient_accumulation_steps=2),
    "a reference that follows": dict(sync_ref_model=True, ref_model_sync_steps=1),
    "precomputed": dict(precompute_ref_log_probs=True),
    "workers": dict(dataloader_num_workers=1),
    "micro-batches": dict(max_tokens=80),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_same_training(both, name):
    stock, patched = both(**OPTIONS[name], max_steps=4)
    if name == "autocast":
        assert_same_in_low_precision(stock, patched, torch.bfloat16, stock.in_float64)
    else:
        assert_same(stock, patched)
    assert patched.calls["policy", "replayed"] >= 2


VERIFIED = {"layers": dict(verify=True), "compiled": dict(verify=True, compile=True), "a newer version": {}}


@pytest.mark.parametrize("options", VERIFIED.values(), ids=VERIFIED)
def test_verified_before_batches_are_recorded(both, caplog, monkeypatch, options):
    """A call that is verified runs the layers, with which each recording is compared. It is no first batch of its
    number of tokens: the same batch follows.
    """
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    if not options:
        set_newer(monkeypatch, "trl")
    with caplog.at_level(logging.INFO, "fastdpo"):
        stock, patched = both(**options, max_steps=4)
    assert_same(stock, patched)
    assert patched.calls["policy", "replayed"] == (1 if "compile" in options else 2)  # which changes the model once
    verified = [x.partition(";")[0] for x in caplog.messages if ": verified" in x]
    layers = "compiled layers" if "compile" in options else "layers"
    assert verified == [
        f"fastdpo: trl.DPOTrainer ({role}): verified with its {layers}, which CUDA graphs are compared with"
        for role in ("policy", "reference")
    ]


class Left(TrainerCallback):
    """The steps that are left in each step, as the library has been told."""

    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, **kwargs):
        training = pace.training()
        self.found.append((training.done, training.left))
        training.settled["policy"] = state.global_step > 1


def test_what_a_trainer_and_its_checkpoint_say(tmp_path):
    """How many steps are left; and a training that is resumed begins with what was decided in the first one."""
    found = []
    with fastdpo.patched("trl.DPOTrainer"):
        for resumed in (False, True):
            left = Left()
            trainer = DPO.build(
                tmp_path,
                tiny_model(),
                tiny_model(seed=1),
                max_steps=4,
                save_steps=2,
                save_strategy="steps",
                callbacks=[left],
            )
            trainer.train(str(tmp_path / "out" / "checkpoint-2") if resumed else None)
            found.append(left.found)
            assert pace.training().left is None  # of a loop that follows
    assert found == [[(0, 4), (1, 3), (2, 2), (3, 1)], [(0, 2), (1, 1)]]
    (state,) = (tmp_path / "out" / "checkpoint-2").glob("trainer_state.json")
    assert json.loads(state.read_text())["stateful_callbacks"][DECIDED] == {"policy": True}
    assert trainer.state.stateful_callbacks[DECIDED] == {"policy": True} == pace.training().settled
    trainer.train()  # no longer patched
    assert DECIDED not in trainer.state.stateful_callbacks
