"""`TPOTrainer.training_step` on prepared batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from torch import Tensor
from trl.experimental.tpo import TPOConfig, TPOTrainer, tpo_trainer

from benchmarks.sides import workload as w
from benchmarks.sides.exact import BETA, ExactStep, Results
from benchmarks.sides.trainer import Tokenized, TrainerStep, build_tokenizer, trainer_options
from benchmarks.sides.workload import Workload


class TokenizedTPOTrainer(Tokenized, TPOTrainer): ...


def examples(workload: Workload, batch: int) -> list[dict[str, list[int]]]:
    """The pairs of the workload. The reference completion of each is the chosen one of the pair before it."""
    pairs = workload.examples(batch)
    return [{**pair, "reference_ids": pairs[i - 1]["chosen_ids"]} for i, pair in enumerate(pairs)]


class TPOStep(TrainerStep):
    """Policy forward and backward. No optimizer."""

    TRAINER = "trl.TPOTrainer"
    KINDS = ("policy",)

    def _build(self, workload: Workload, directory: Path, attention: str) -> TPOTrainer:
        return TokenizedTPOTrainer(
            model=w.build_model(workload, w.POLICY, attention),
            args=TPOConfig(**trainer_options(workload, directory), beta=BETA),
            train_dataset=Dataset.from_list(examples(workload, 0)),
            processing_class=build_tokenizer(),
        )

    def _examples(self, workload: Workload, batch: int) -> list[dict[str, Any]]:
        return examples(workload, batch)

    @contextmanager
    def _recorded(self, record: Callable[[str, Tensor], None]) -> Iterator[None]:
        name = "selective_log_softmax_and_entropy"
        stock = getattr(tpo_trainer, name)

        def recorded(*args: Any, row_mask: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
            logps, entropy = stock(*args, row_mask=row_mask, **kwargs)
            record("log-probs of the policy", logps[row_mask.bool()])
            return logps, entropy

        with mock.patch.object(tpo_trainer, name, recorded):
            yield


class ExactTPOStep(ExactStep):
    """The ground truth of `TPOStep`."""

    COMPLETIONS = ("chosen_ids", "rejected_ids", "reference_ids")
    HAS_REFERENCE = False

    def _examples(self, batch: int) -> list[dict[str, list[int]]]:
        return examples(self.workload, batch)

    def _loss_of_tokens(self, logps: list[Tensor], reference_logps: list[Tensor]) -> tuple[Tensor, Results]:
        pairs = 2 * len(logps) // 3
        sums = torch.stack([x.sum() for x in logps[:pairs]])
        return self._loss(sums) - torch.cat(logps[pairs:]).mean(), {}
