"""Evaluation of a batch in TRL's `DPOTrainer`: as shipped, on labelled positions only, patched."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import Arrays
from benchmarks.sides.exact import ExactStep
from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import Workload


class EvaluationStep(TrainerStep):
    """Computes loss and metrics from policy and reference, without gradients."""

    KINDS = ("eval", "reference")

    def __init__(self, workload: Workload, mode: str) -> None:
        super().__init__(workload, mode)
        self.model.eval()

    def _run(self, batch: int) -> torch.Tensor:
        loss, *_ = self.trainer.prediction_step(self.model, dict(self.inputs[batch]), prediction_loss_only=True)
        return loss

    def reset(self) -> None:
        self.trainer._metrics["eval"].clear()


class ExactEvaluation(ExactStep):
    """The ground truth of `EvaluationStep`."""

    def check(self) -> Arrays:
        arrays: dict[str, Any] = super().check()
        return {name: values for name, values in arrays.items() if not name.endswith("/gradient")}
