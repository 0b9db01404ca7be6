"""TRL's pass for reference log-probabilities: as it is, with its CUDA way of choosing positions, patched."""

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

NAMES = "chosen", "rejected"


class Precompute(TrainerStep):
    """All batches of the workload are one data set; the trainer's batches are as large as the workload's."""

    def __init__(self, workload: Workload, mode: str) -> None:
        datasets.disable_caching()  # what is timed is the pass
        super().__init__(workload, mode)
        self.pairs = [pair for batch in range(self.batches) for pair in w.examples(workload, batch)]
        self.batches = 1

    def check(self) -> Arrays:
        found = self._pass()
        return {f"log-probs of the {name}": torch.tensor(found[f"ref_{name}_logps"][:]).numpy() for name in NAMES}

    def step(self, batch: int) -> None:
        self._pass()
        self.steps += 1

    def _pass(self) -> Dataset:
        size = self.trainer.args.per_device_train_batch_size
        return self.trainer._precompute_ref_logps(Dataset.from_list(self.pairs), "train", size)


class ExactPass(ExactStep):
    def check(self) -> Arrays:
        exact, plain = self._sums(torch.float64), self._sums(torch.float32)
        arrays: dict[str, Any] = {}
        for name, of_exact, of_plain in zip(NAMES, exact, plain, strict=True):
            arrays |= {f"exact/log-probs of the {name}": of_exact.numpy()}
            arrays |= {f"plain/log-probs of the {name}": of_plain.numpy()}
        return arrays

    @torch.no_grad()
    def _sums(self, dtype: torch.dtype) -> torch.Tensor:
        """[2, pairs]"""
        model = w.build_model(self.workload, w.REFERENCE).to(dtype)
        of_batches = [
            torch.stack([self._logps(model, *row, dtype).sum() for row in self._rows(batch)]).view(2, -1)
            for batch in range(self.batches)
        ]
        return torch.cat(of_batches, 1)
