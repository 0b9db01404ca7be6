"""`patch(max_tokens=...)` for TRL's SFTTrainer.

The loss of a step is a sum over its tokens, which the trainer divides by their number in all batches that the step
accumulates. So rows weigh the same in any micro-batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from .row_budget import Batch, PaddedRowBudget


class SFTBudget(PaddedRowBudget):
    """Cuts the steps of one trainer."""

    entries = frozenset({"input_ids", "attention_mask", "labels"})
    fields = ("log_probs", "label_mask", "entropy", "is_top1")

    def unsupported_reason(self, trainer: Any) -> str | None:
        if trainer.model_accepts_loss_kwargs:
            return None
        return "models whose loss does not take num_items_in_batch, since it then is a mean over the tokens of a batch"

    def weighing(
        self, trainer: Any, batches: list[Batch], joined: Batch, rows: Tensor
    ) -> AbstractContextManager[object]:
        return nullcontext()
