"""Trainers and callbacks that act on one rank only, or after one step only."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from trl import DPOTrainer

import fastdpo
from tests.support.workers.collectives import COLLECTIVES


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


class ChangesModel(TrainerCallback):
    """Changes the first rank's policy after each of the first three steps: a hook on the head, then another
    forward of the head instead, then a hook on a layer. TRL reads the weight of the head and calls neither of
    the first two, which would double the logits. The third has no effect.
    """

    def __init__(self, trainer: DPOTrainer):
        self.model = trainer.accelerator.unwrap_model(trainer.model)

    def on_step_end(self, args, state, control, **kwargs):
        if dist.get_rank():
            return
        head = self.model.get_output_embeddings()
        if state.global_step == 1:
            self.hook = head.register_forward_hook(lambda module, args, output: 2 * output)
        if state.global_step == 2:
            self.hook.remove()
            self.own = vars(head).get("forward")
            head.forward = lambda hidden: 2 * torch.nn.functional.linear(hidden, head.weight)
        if state.global_step == 3:
            del head.forward
            if self.own is not None:
                head.forward = self.own
            self.model.model.layers[0].register_forward_hook(lambda module, args, output: None)


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
