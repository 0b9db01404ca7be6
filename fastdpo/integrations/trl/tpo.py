"""TRL's TPOTrainer: chosen, rejected and reference completions of a prompt, which share it.

With `patch(max_tokens=...)`, the pairs of a batch have a mean loss, and so may be trained on in any micro-batch. The
log-likelihood of the reference completions is a mean over the tokens of TRL's batch. In a micro-batch, those of each
row are multiplied so that the mean over its tokens gives them the weight that they have there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..collating import REPLACED
from ..scored_rows import ScoredRows
from .dpo import computing_loss
from .logits_line import LogitsBudget, LogitsLine
from .max_tokens.budget import STEPS
from .max_tokens.refusals import require_supported
from .max_tokens.steps import Batch

_WEIGHT = "reference_weight"
"""An entry of micro-batches: for each row, the pairs of TRL's batch by the tokens of its reference completions, [N]."""


def uncuttable(trainer: Any) -> str | None:
    return "tpo_alpha=0, with which batches have no reference completions" if trainer.tpo_alpha == 0 else None


def with_weights(joined: Batch, sizes: list[int]) -> Batch:
    """The weights of triples of batches that have these sizes."""
    tokens = joined["completion_mask"][:, 2, 1:].sum(1)
    require_supported(None if tokens.all() else "reference completions that truncation has left nothing of")
    return {_WEIGHT: torch.cat([(len(x) / x.sum().double()).expand(len(x)) for x in tokens.split(sizes)])}


class TPOLine(LogitsLine):
    relies_on = ("_compute_loss",)
    replaced = ("_compute_loss", *REPLACED)
    cutting = LogitsBudget(
        relies_on=(*STEPS, "compute_loss", ":DataCollatorForTriplePreference.torch_call"),
        rows_of_unit=3,
        entries=frozenset({"input_ids", "attention_mask", "completion_mask"}),
        added=with_weights,
        uncuttable=uncuttable,
    )

    def _compute_loss(
        self, stock: Callable, trainer: Any, model: Any, inputs: Batch, return_outputs: bool, *args: Any, **kwargs: Any
    ) -> Any:
        inputs, state = dict(inputs), self.state_of(trainer)
        weights, called = inputs.pop(_WEIGHT, None), self.noting(trainer, model)
        if weights is not None:
            called = functools.partial(self._weighted, trainer, called, weights, inputs["completion_mask"])
        with computing_loss(trainer, state, [model], inputs), self.scoring(trainer, inputs, return_outputs):
            return stock(trainer, called, inputs, return_outputs, *args, **kwargs)

    def _weighted(self, trainer: Any, model: Callable, weights: Tensor, mask: Tensor, **inputs: Any) -> ScoredRows:
        """The output of the model for a micro-batch of rows with these weights [N], and with this mask of completions
        [3 N, L].
        """
        rows = self.rows_of(trainer, model(**inputs), mask.shape[1])
        n = len(weights)
        factors = torch.cat([weights.new_ones(2 * n), weights * mask[2 * n :, 1:].sum() / n])
        return rows._replace(logps=rows.logps * factors.to(rows.logps)[:, None])
