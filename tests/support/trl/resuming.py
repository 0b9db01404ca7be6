"""Tiny DPO trainings in TRL that stop in the middle of an epoch and continue in another trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOTrainer

from tests.support.trl.dpo import build, tiny_model

STEPS, STOPPED_AT = 8, 3


class Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == STOPPED_AT


def assert_resumes(directory: Path, rows: list[dict], **options) -> None:
    """Asserts that a training which stops at `STOPPED_AT` of `STEPS` steps, and continues, ends in the
    weights of one that does not stop.

    `options` are fields of `DPOConfig`, with which the stop is in the middle of an epoch.
    """

    def trainer(name: str) -> DPOTrainer:
        of_config = dict(max_steps=STEPS, save_strategy="steps", save_steps=1, optim="adamw_torch") | options
        made = build(directory / name, tiny_model(), tiny_model(seed=1), **of_config)
        made.train_dataset = made._prepare_dataset(Dataset.from_list(rows), made.processing_class, made.args, "train")
        return made

    whole = trainer("whole")
    whole.train()
    stopped = trainer("stopped")
    stopped.add_callback(Stops())
    stopped.train()
    resumed = trainer("stopped")
    resumed.train(resume_from_checkpoint=str(directory / "stopped" / "out" / f"checkpoint-{STOPPED_AT}"))
    assert resumed.state.global_step == STEPS
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert get_last_checkpoint(str(directory / "stopped" / "out")).endswith(f"checkpoint-{STEPS}")
