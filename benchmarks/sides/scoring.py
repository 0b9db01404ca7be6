"""What TRL's `DPOTrainer` computes without gradients: evaluation of a batch, and its pass for reference log-probs."""

from __future__ import annotations

import datasets
import torch
from datasets import Dataset

from benchmarks.cases import Arrays
from benchmarks.sides.exact import ExactCompletions, ExactStep
from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import Workload


class EvaluationStep(TrainerStep):
    """Computes loss and metrics from policy and reference."""

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
        return {name: values for name, values in super().check().items() if not name.endswith("/gradient")}


class PrecomputeStep(TrainerStep):
    """One pass over a dataset made of all batches of the workload."""

    def __init__(self, workload: Workload, mode: str) -> None:
        datasets.disable_caching()  # otherwise only the first pass would compute
        super().__init__(workload, mode)
        self.pairs = [pair for batch in range(self.batches) for pair in workload.examples(batch)]
        self.size, self.batches = len(workload.batches[0]), 1

    def check(self) -> Arrays:
        """Sums over completions, batch by batch: those of the chosen ones, then those of the rejected ones."""
        dataset = self._pass()
        sums = torch.tensor([dataset[f"ref_{name}_logps"][:] for name in ("chosen", "rejected")])  # [2, pairs]
        return {"log-probs of the reference": torch.cat([x.flatten() for x in sums.split(self.size, 1)]).numpy()}

    def step(self, batch: int) -> None:
        self._pass()
        self._count(batch)

    def _pass(self) -> Dataset:
        return self.trainer._precompute_ref_logps(Dataset.from_list(self.pairs), "train", self.size)


class ExactPrecompute(ExactCompletions):
    """The ground truth of `PrecomputeStep`."""

    def check(self) -> Arrays:
        return {name: x for name, x in super().check().items() if name.endswith("/log-probs of the reference")}
