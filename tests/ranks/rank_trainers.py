"""Trainers and callbacks that do at one moment, or on one rank, what they don't do otherwise."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch.distributed as dist
from transformers import TrainerCallback
from trl import DPOTrainer
from trl_ranks_worker import COLLECTIVES

import fastdpo


class MainLogs(TrainerCallback):
    """The main process logs a number of its own after every other step."""

    def __init__(self, trainer: DPOTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step % 2:
            self.trainer.log({"x": 1.0})


class MainReads(TrainerCallback):
    """The main process reads metrics after each step, as a progress bar or an alarm does."""

    def __init__(self, trainer: DPOTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            for name, values in self.trainer._metrics["train"].items():
                read = float(values[-1])
                if not -1e3 < read < 1e4:
                    raise AssertionError(f"{name} must be a number; got {read}")


class Unpatches(TrainerCallback):
    """Every rank unpatches after the first step, which must communicate nothing: ranks may be anywhere then."""

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
    """The last rank fails in its second step, while the others reduce their gradients."""

    steps = 0

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("the last rank fails in its second step")
        return loss


def with_callback(kind: type[TrainerCallback]) -> type[DPOTrainer]:
    class Trainer(DPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(kind(self))

    return Trainer
