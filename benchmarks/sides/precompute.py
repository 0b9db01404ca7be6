"""TRL's pass for reference log-probs: as shipped, on labelled positions only, patched."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from datasets import Dataset

from benchmarks.cases import Arrays
from benchmarks.sides import workload as w
from benchmarks.sides.exact import ExactStep
from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import Workload

COMPLETIONS = "chosen", "rejected"


class PrecomputeStep(TrainerStep):
    """One pass over a dataset made of all batches of the workload."""

    def __init__(self, workload: Workload, mode: str) -> None:
        datasets.disable_caching()  # otherwise only the first pass would compute
        super().__init__(workload, mode)
        self.pairs = [pair for batch in range(self.batches) for pair in workload.examples(batch)]
        self.batches = 1

    def check(self) -> Arrays:
        dataset = self._pass()
        return {
            f"log-probs of the {name}": torch.tensor(dataset[f"ref_{name}_logps"][:]).numpy() for name in COMPLETIONS
        }

    def step(self, batch: int) -> None:
        self._pass()
        self._count(batch)

    def _pass(self) -> Dataset:
        size = self.trainer.args.per_device_train_batch_size
        return self.trainer._precompute_ref_logps(Dataset.from_list(self.pairs), "train", size)


class ExactPrecompute(ExactStep):
    """The ground truth of `PrecomputeStep`."""

    def check(self) -> Arrays:
        exact, plain = self._sums(torch.float64), self._sums(torch.float32)
        arrays: dict[str, Any] = {}
        for name, exact_sums, plain_sums in zip(COMPLETIONS, exact, plain, strict=True):
            arrays |= {f"exact/log-probs of the {name}": exact_sums.numpy()}
            arrays |= {f"plain/log-probs of the {name}": plain_sums.numpy()}
        return arrays

    @torch.no_grad()
    def _sums(self, dtype: torch.dtype) -> torch.Tensor:
        """Summed log-probs [2, pairs]: of the chosen, then of the rejected completions."""
        model = w.build_model(self.workload, w.REFERENCE).to(dtype)
        batches = [
            torch.stack([self._logps(model, *row, dtype).sum() for row in self._rows(batch)]).view(2, -1)
            for batch in range(self.batches)
        ]
        return torch.cat(batches, 1).cpu()
