"""A step of TRL's `DPOTrainer` that `patch(max_tokens=...)` cuts into micro-batches."""

from __future__ import annotations

import torch

from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import Workload
from fastdpo.batching import CostModel, StepPlanner
from fastdpo.batching.sampler import shared_among_ranks
from fastdpo.integrations.trl.max_tokens.budgeted_loader import MicroBatches
from fastdpo.lengths import PairLengths, pair_lengths


def half_of_the_longest_step(lengths: list[PairLengths]) -> int:
    """Half of the distinct tokens of the longest step, or those of its longest pair."""
    of_steps = [of_step.packed() for of_step in lengths]
    return max(max(int(tokens.max()), -(-int(tokens.sum()) // 2)) for tokens in of_steps)


class BudgetStep(TrainerStep):
    """Policy forward and backward, reference forward, at half of the distinct tokens at a time."""

    def __init__(self, workload: Workload) -> None:
        examples = [workload.examples(i) for i in range(len(workload.batches))]
        lengths = [pair_lengths(pairs, workload.max_length) for pairs in examples]
        max_tokens = half_of_the_longest_step(lengths)
        super().__init__(workload, "fastdpo", max_tokens=max_tokens)
        cost = CostModel.of_model(self.trainer.model)
        self._cuts = [
            shared_among_ranks(StepPlanner(of_step, max_tokens, cost=cost).cut(range(len(of_step))))[0]
            for of_step in lengths
        ]
        self._micro_batches = [
            MicroBatches((self.trainer.data_collator([pairs[i] for i in x.pairs]), x.share) for x in cut)
            for pairs, cut in zip(examples, self._cuts, strict=True)
        ]
        self._batch = 0

    def _run(self, batch: int) -> torch.Tensor:
        self._batch = batch
        return self.trainer.training_step(self.model, self._micro_batches[batch])

    def _in_order(self, calls: list[torch.Tensor]) -> torch.Tensor:
        rows: dict[int, torch.Tensor] = {}
        cut, micro_batches = self._cuts[self._batch], self._micro_batches[self._batch]
        n = sum(len(x.pairs) for x in cut)
        for logps, x, (inputs, _) in zip(calls, cut, micro_batches, strict=True):
            of_rows = [*x.pairs, *(n + i for i in x.pairs)]
            sizes = inputs["completion_mask"][:, 1:].sum(1).tolist()
            rows |= zip(of_rows, logps.split(sizes), strict=True)
        return torch.cat([rows[i] for i in range(2 * n)])
