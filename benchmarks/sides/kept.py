"""A checkpointed step of TRL's `DPOTrainer`, patched, that keeps activations where there is room, or recomputes all."""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.sides.accumulated import OfProcessor
from benchmarks.sides.trainer import STEPS_OF_LEARNING, TrainerStep
from benchmarks.sides.workload import Workload
from fastdpo.models.running import pace


class KeptStep(OfProcessor, TrainerStep):
    """Policy forward and backward, reference forward, in a training whose optimizer makes steps."""

    def __init__(self, workload: Workload, keeps: bool) -> None:
        os.environ["FASTDPO_AUTO"] = str(int(keeps))
        super().__init__(workload, "fastdpo")
        for _ in range(STEPS_OF_LEARNING):
            self._run_all()

    def _run(self, batch: int) -> torch.Tensor:
        pace.training().done += 1
        return super()._run(batch)

    def facts(self) -> dict[str, Any]:
        from fastdpo.ops import memory

        return super().facts() | {"held": [x.removeprefix("fastdpo: ") for x in memory.lines()]}
