"""`KTOTrainer.training_step` on prepared batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import KTOConfig, KTOTrainer

from benchmarks.sides import workload as w
from benchmarks.sides.exact import BETA, ExactStep
from benchmarks.sides.trainer import Tokenized, TrainerStep, build_tokenizer, trainer_options
from benchmarks.sides.workload import Workload


class TokenizedKTOTrainer(Tokenized, KTOTrainer): ...


def examples(workload: Workload, batch: int) -> list[dict[str, Any]]:
    """One row for each pair of the workload: its prompt and its chosen completion.

    Every other row is desirable. As in TRL, the KL term of a row has the completion of the row
    before it.
    """
    pairs = workload.examples(batch)
    return [
        {
            "prompt_ids": pair["prompt_ids"],
            "completion_ids": pair["chosen_ids"],
            "KL_completion_ids": pairs[i - 1]["chosen_ids"],
            "label": i % 2 == 0,
        }
        for i, pair in enumerate(pairs)
    ]


class KTOStep(TrainerStep):
    """Policy forward and backward, its pass for the KL term, reference forward. No optimizer."""

    TRAINER = "trl.KTOTrainer"
    SHARES = False

    def _build(self, workload: Workload, directory: Path, attention: str) -> KTOTrainer:
        return TokenizedKTOTrainer(
            model=w.build_model(workload, w.POLICY, attention),
            ref_model=w.build_model(workload, w.REFERENCE, attention).eval(),  # as from_pretrained returns it
            args=KTOConfig(**trainer_options(workload, directory)),
            train_dataset=Dataset.from_list(examples(workload, 0)),
            processing_class=build_tokenizer(),
        )

    def _examples(self, workload: Workload, batch: int) -> list[dict[str, Any]]:
        return examples(workload, batch)

    def _in_order(self, calls: list[torch.Tensor]) -> torch.Tensor:
        """Log-probs of the completions, then those of the KL term, which has the first of two calls."""
        return torch.cat(calls[::-1])


class ExactKTOStep(ExactStep):
    """The ground truth of `KTOStep`."""

    COMPLETIONS = ("completion_ids", "KL_completion_ids")

    def _examples(self, batch: int) -> list[dict[str, Any]]:
        return examples(self.workload, batch)

    def _loss(self, ratios: torch.Tensor) -> torch.Tensor:
        of_rows, of_kl = ratios.view(2, -1)
        kl = of_kl.mean().detach().clamp(min=0)
        signs = torch.tensor([1 if i % 2 == 0 else -1 for i in range(len(of_rows))], device=ratios.device)
        return (1 - torch.sigmoid(BETA * signs * (of_rows - kl))).mean()
