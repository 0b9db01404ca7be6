"""A step of TRL's `DPOTrainer` that `patch(max_tokens=...)` cuts into micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import Workload
from fastdpo.integrations.bypass import STATE
from fastdpo.models.calls import outcomes


def half_of_the_longest_step(workload: Workload) -> int:
    """Half of the distinct tokens of the longest step, or those of its longest pair."""
    steps = [[sum(pair) for pair in pairs] for pairs in workload.batches]
    return max(max(max(tokens), -(-sum(tokens) // 2)) for tokens in steps)


class BudgetStep(TrainerStep):
    """Policy forward and backward, reference forward, at half of the distinct tokens at a time."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, "fastdpo", max_tokens=half_of_the_longest_step(workload))
        self._batch, self._pairs = 0, list[torch.Tensor]()  # of each micro-batch
        budget = vars(self.trainer)[STATE].budget
        cut = budget._cut

        def recorded(*args: Any) -> list[torch.Tensor]:
            self._pairs = cut(*args)
            return self._pairs

        budget._cut = recorded

    def _run(self, batch: int) -> torch.Tensor:
        self._batch = batch
        return super()._run(batch)

    def prove(self) -> None:
        """See `TrainerStep.prove`."""
        super().prove()
        steps, parts = (outcomes[self.TRAINER, kind] for kind in ("steps", "micro-batches"))
        if parts <= steps:
            raise RuntimeError(f"the side must cut steps; {steps} steps had {parts} micro-batches")

    def _in_order(self, calls: list[torch.Tensor]) -> torch.Tensor:
        rows: dict[int, torch.Tensor] = {}
        counts = self.inputs[self._batch]["completion_mask"][:, 1:].sum(1)
        for logps, pairs in zip(calls, self._pairs, strict=True):
            of_rows = torch.cat([pairs, pairs + len(counts) // 2])
            rows |= zip(of_rows.tolist(), logps.split(counts[of_rows].tolist()), strict=True)
        return torch.cat([rows[i] for i in range(len(counts))])
