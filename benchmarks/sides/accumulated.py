"""Steps of TRL's trainers that accumulate small batches, as their data loaders yield them, and their ground truth.

Where rows lie depends on the side, so losses and gradients are compared, and no scores of rows.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from datasets import Dataset

from benchmarks.cases import Arrays
from benchmarks.equality import FLOAT32_FLOOR
from benchmarks.sides.exact import ExactStep
from benchmarks.sides.groups import ExactGroupStep, GroupStep
from benchmarks.sides.kto import ExactKTOStep, KTOStep
from benchmarks.sides.reward import ExactRewardStep, RewardStep
from benchmarks.sides.trainer import STEPS_LEFT, STEPS_OF_LEARNING, TrainerStep
from benchmarks.sides.workload import AccumulatedWorkload, GroupWorkload
from fastdpo.commands.check import meters
from fastdpo.models.calls import outcomes
from fastdpo.ops import memory


class OfProcessor:
    """On a CPU, steps are timed by the time of the processor, in which other programs have no part."""

    def now(self) -> float:
        return meters.now() if torch.accelerator.is_available() else time.process_time()


class _Accumulated(OfProcessor, TrainerStep):
    """Forward and backward of all batches of a step, from the trainer's data loader. Each batch of the workload is the
    dataset of one step.
    """

    workload: AccumulatedWorkload

    def __init__(self, workload: AccumulatedWorkload, mode: str, **options: Any) -> None:
        super().__init__(workload, mode, **options)
        self.trainer.args.train_sampling_strategy = "sequential"
        self.loaders = []
        for batch in range(self.batches):
            self.trainer.train_dataset = Dataset.from_list(self._examples(workload, batch))
            self.loaders.append(self.trainer.get_train_dataloader())
        self.trainer.state.max_steps = STEPS_LEFT
        self._say("on_train_begin")
        # With graphs, the steps in which tokens are counted are enough.
        for _ in range(STEPS_OF_LEARNING if "max_tokens" in options and not self.graphs else 0):
            self._run_all()

    def _check(self) -> Arrays:
        arrays = super()._check()
        return {name: arrays[name] for name in ("loss", "gradient")}

    def _run(self, batch: int) -> torch.Tensor:
        losses = []
        self._say("on_step_begin")
        for i, inputs in enumerate(self.loaders[batch], 1):
            self.trainer.accelerator.gradient_state._set_sync_gradients(i == self.accumulation)
            losses.append(self.trainer.training_step(self.model, inputs))
        self.trainer.state.global_step += 1
        return torch.stack(losses).sum()


class AccumulatedDPO(_Accumulated): ...


class CheckpointedDPO(AccumulatedDPO):
    """Of a training in which memory is spent as `auto`, the value of FASTDPO_AUTO, and `max_tokens` say."""

    def __init__(self, workload: AccumulatedWorkload, mode: str, auto: str = "0", **options: Any) -> None:
        os.environ[memory.VARIABLE] = auto
        super().__init__(workload, mode, max_tokens=options.get("max_tokens"))

    def facts(self) -> dict[str, Any]:
        parts = outcomes[self.TRAINER, "micro-batches"] / max(outcomes[self.TRAINER, "steps"], 1)
        held = [x.removeprefix("fastdpo: ") for x in memory.lines()]
        return super().facts() | {"micro_batches": parts or self.accumulation, "held": held}


class AccumulatedReward(_Accumulated, RewardStep): ...


class AccumulatedKTO(_Accumulated, KTOStep): ...


class AccumulatedGRPO(OfProcessor, GroupStep): ...


class ExactAccumulatedKTO(ExactKTOStep):
    """The KL term is that of a batch."""

    def _loss(self, ratios: torch.Tensor) -> torch.Tensor:
        loss = super()._loss
        batches = ratios.view(2, self.workload.accumulation, -1).unbind(1)
        return torch.stack([loss(batch.flatten()) for batch in batches]).mean()


EXACT = {"DPO": ExactStep, "Reward": ExactRewardStep, "KTO": ExactAccumulatedKTO}


class ExactAccumulated:
    """The ground truth of a step, without the scores of rows. That of GRPO has them."""

    def __init__(self, workload: AccumulatedWorkload | GroupWorkload) -> None:
        self._scores = isinstance(workload, GroupWorkload)
        self._exact = (ExactGroupStep if self._scores else EXACT[workload.trainer])(workload)
        self.batches = self._exact.batches

    def check(self) -> Arrays:
        arrays = self._exact.check()
        if self._scores:  # the loss is a sum over batches of terms as large as advantages, which cancel
            scale = float(abs(arrays["exact/advantages"]).max() / abs(arrays["exact/loss"]).min())
            arrays["slack/loss"] = torch.tensor(FLOAT32_FLOOR * scale).numpy()
        return {name: x for name, x in arrays.items() if self._scores or name.endswith(("/loss", "/gradient"))}
