"""`patch(max_tokens=...)` for TRL's GRPOTrainer and RLOOTrainer.

TRL shuffles the completions of a generation before it cuts them into the batches that a step accumulates, and only
rows of one batch can share their prompt. Here the batches of a step are collected as far as they come from one
generation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...replacements import temporarily
from .row_budget import Batch, RowBudget, Scores

MEANS_OVER_ROWS = {"grpo", "sapo", "dr_grpo", "luspo"}
SUMS_OVER_A_GENERATION = {"dapo", "cispo", "vespo"}
"""The values of `loss_type` that are supported, by what divides a loss: its own rows and the number of batches that a
step accumulates, or the tokens of a generation.
"""


class GroupBudget(RowBudget):
    """Cuts the steps of one trainer. Scores are log-probabilities and entropies of completions."""

    def unsupported_reason(self, trainer: Any) -> str | None:
        loss_type = getattr(trainer, "loss_type", "grpo")
        if loss_type not in MEANS_OVER_ROWS | SUMS_OVER_A_GENERATION:
            return f"loss_type={loss_type!r}, which depends on the batch of a row"
        if getattr(trainer, "_entropy_bonus_enabled", False):
            return "an entropy bonus, which is a mean over the tokens of a batch"
        if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
            return "top_entropy_quantile below 1, which ranks the tokens of a batch"
        return None

    def must_train(self, trainer: Any) -> bool:
        return (trainer._step + 1) % (trainer.args.steps_per_generation * trainer.num_iterations) == 0

    def joined(self, trainer: Any, batches: list[Batch]) -> Batch:
        return {name: joined_entry(name, [x[name] for x in batches]) for name in batches[0]}

    def tokens(self, joined: Batch) -> list[NDArray[np.int64]]:
        parts = (joined[f"{x}_ids"].masked_fill(joined[f"{x}_mask"] == 0, -1) for x in ("prompt", "completion"))
        return [row[row >= 0] for row in torch.cat([*parts], 1).cpu().numpy()]

    def width(self, batch: Batch) -> int:
        return batch["completion_ids"].shape[1]

    def micro_batch(self, trainer: Any, joined: Batch, rows: Tensor) -> Batch:
        rows = rows.to(trainer.accelerator.device)
        return {name: x[rows] if x is not None and x.ndim else x for name, x in joined.items()}

    def weighing(
        self, trainer: Any, batches: list[Batch], joined: Batch, rows: Tensor
    ) -> AbstractContextManager[object]:
        accumulated = trainer.current_gradient_accumulation_steps
        rows_of_step = accumulated * len(batches[0]["prompt_ids"])
        is_mean = getattr(trainer, "loss_type", None) not in SUMS_OVER_A_GENERATION
        divisor = rows_of_step / len(rows) if is_mean else accumulated
        return temporarily(trainer, current_gradient_accumulation_steps=divisor)

    def known_scores(self, scores: Scores) -> Any:
        return *scores, None  # no auxiliary loss


def joined_entry(name: str, values: list[Any]) -> Tensor | None:
    """An entry of batches of one generation, in one tensor."""
    first = values[0]
    if first is None or (isinstance(first, Tensor) and first.ndim == 0):  # of the whole generation
        return first
    if not isinstance(first, Tensor) or name.startswith(("pixel", "image")):
        raise NotImplementedError(f"patch: max_tokens does not support batches with {name}, such as those with images")
    return torch.cat(values)
