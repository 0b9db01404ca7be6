"""TRL's evaluation of a batch: as it is, with its CUDA way of choosing positions, patched."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import Arrays
from benchmarks.sides.exact import ExactStep
from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import Workload


class EvaluationStep(TrainerStep):
    """The loss and metrics of policy and reference, without gradients."""

    FUSED = frozenset({("trl.DPOTrainer", "eval", "fused"), ("trl.DPOTrainer", "reference", "fused")})

    def __init__(self, workload: Workload, mode: str) -> None:
        super().__init__(workload, mode)
        self.model.eval()

    def _run(self, batch: int) -> torch.Tensor:
        loss, *_ = self.trainer.prediction_step(self.model, dict(self.inputs[batch]), prediction_loss_only=True)
        return loss

    def rest(self) -> None:
        self.trainer._metrics["eval"].clear()


class ExactEvaluation(ExactStep):
    def check(self) -> Arrays:
        found: dict[str, Any] = super().check()
        return {name: values for name, values in found.items() if not name.endswith("/gradient")}
