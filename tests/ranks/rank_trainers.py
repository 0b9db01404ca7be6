"""Trainers and callbacks that act on one rank only, or after one step only."""

from __future__ import annotations

import os
from contextlib import ExitStack
from unittest import mock

import torch.distributed as dist
from transformers import TrainerCallback
from trl import DPOTrainer
from trl_ranks_worker import COLLECTIVES

import fastdpo
from fastdpo.integrations.protocol import STATE
from fastdpo.models.local_shards import local_shard


class BecomesStrict(TrainerCallback):
    """Sets strict mode once the training begins: `patch()` is strict about trainers of earlier cases, too."""

    def __init__(self, trainer: DPOTrainer):
        pass

    def on_train_begin(self, args, state, control, **kwargs):
        os.environ["FASTDPO_STRICT"] = "1"


class MainLogs(TrainerCallback):
    """Logs an additional number on the main process after every other step."""

    def __init__(self, trainer: DPOTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step % 2:
            self.trainer.log({"x": 1.0})


class MainReads(TrainerCallback):
    """Reads metrics on the main process after each step, as a progress bar or an alert does."""

    def __init__(self, trainer: DPOTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            for name, values in self.trainer._metrics["train"].items():
                value = float(values[-1])
                if not -1e3 < value < 1e4:
                    raise AssertionError(f"{name} must be between -1e3 and 1e4; got {value}")


class Rehearsed(TrainerCallback):
    """Asserts that a patched training has rehearsed its largest batch."""

    def __init__(self, trainer: DPOTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.largest = []
        patched = vars(self.trainer).get(STATE)
        if patched is not None:
            run = patched.rehearsal._run
            patched.rehearsal._run = lambda *args: (self.largest.append(args[-1]), run(*args))

    def on_train_end(self, args, state, control, **kwargs):
        if STATE in vars(self.trainer) and (len(self.largest) != 1 or not self.largest[0].is_drawn):
            raise AssertionError(f"one drawn batch must be rehearsed; got {self.largest}")


class Forgets(TrainerCallback):
    """Empties the reference memory of the last rank after the first epoch."""

    def __init__(self, trainer: DPOTrainer):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        if state.epoch and STATE in vars(self.trainer) and dist.get_rank() == dist.get_world_size() - 1:
            vars(self.trainer)[STATE].memory._values.clear()


class ChangesShard(TrainerCallback):
    """Changes the last rank's shards of the reference's first layer after the first epoch."""

    def __init__(self, trainer: DPOTrainer):
        self.trainer = trainer

    def on_epoch_begin(self, args, state, control, **kwargs):
        if state.epoch and dist.get_rank() == dist.get_world_size() - 1:
            for name, x in self.trainer.ref_model.named_parameters():
                if ".layers.0." in name:
                    local_shard(x).detach().mul_(1.5)


class Unpatches(TrainerCallback):
    """Unpatches on every rank after the first step.

    `unpatch` must not communicate, since the other ranks may be at a different point.
    """

    def __init__(self, trainer: DPOTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            with ExitStack() as stack:
                for name in COLLECTIVES:
                    stack.enter_context(mock.patch.object(dist, name, _refused))
                fastdpo.unpatch()


def _refused(*args, **kwargs):
    raise AssertionError("a collective was called by unpatch()")


class LastRaises(DPOTrainer):
    """Raises on the last rank in its second step, while the other ranks reduce gradients."""

    steps = 0

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("the last rank fails in its second step")
        return loss


def with_callback(kind: type[TrainerCallback]) -> type[DPOTrainer]:
    """A trainer class that adds a callback, created with the trainer."""

    class Trainer(DPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(kind(self))

    return Trainer
