"""ms-swift's DPOTrainer, patched where it scores a batch, in `concatenated_forward`.

Training, evaluation and the reference all call it.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...models.fallback import counting_calls_as
from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..concatenated import Inputs, install, score
from ..protocol import PatchOptions
from .batches import OutputOfRows
from .line import SwiftLine

_line = SwiftLine(
    "DPOTrainer",
    path=("get_batch_loss_metrics", "concatenated_forward"),
    parameters={
        "concatenated_forward": ["self", "model", "batch", "is_ref_model"],
        "get_batch_loss_metrics": ["self", "model", "batch", "train_eval", "pair_loss_scale"],
    },
)
trainer_class = _line.trainer_class
unsupported_reason = _line.unsupported_reason
disable = _line.disable


def enable(options: PatchOptions) -> None:
    trainer = trainer_class()
    stock_forward = trainer.concatenated_forward

    @functools.wraps(stock_forward)
    def concatenated_forward(self, model, batch, is_ref_model=False):
        if not _line.calls(self, model):  # created before patch()
            return stock_forward(self, model, batch, is_ref_model)
        inputs = _line.inputs_of(self, batch, model, router_logits=self.aux_loss_enabled)

        def stock(of_rows):
            if of_rows is not model and not isinstance(inputs, Reason):
                of_rows = OutputOfRows(of_rows, inputs, self.template.padding_free)
            return stock_forward(self, of_rows, batch, is_ref_model)

        ld_alpha = None if is_ref_model else self.args.ld_alpha
        with counting_calls_as("reference") if is_ref_model else nullcontext():
            return score(model, _line.name, inputs, functools.partial(_results, ld_alpha), stock)

    _line.watch(lambda trainer, models: install(models, _line.name, options))
    _line.replacements.put(trainer, "concatenated_forward", concatenated_forward)


def _results(ld_alpha: float | None, inputs: Inputs, output: dict[str, Tensor]) -> dict[str, Any]:
    """The return value of ms-swift."""
    logps = output["log_probs"]  # [2B, L-1], zero where nothing is scored
    scored = inputs["labels"][:, 1:].to(logps.device) != IGNORE_INDEX
    counts = scored.sum(1)  # [2B]
    chosen, rejected = slice(0, len(counts) // 2), slice(len(counts) // 2, None)
    sums = logps.sum(1)
    results = {"nll_loss": -sums[chosen].sum() / counts[chosen].sum()}
    if ld_alpha is not None:  # arXiv 2409.06411: tokens after the length of the shorter completion weigh less
        shorter = torch.minimum(counts[chosen], counts[rejected]).repeat(2)
        own = scored.cumsum(1) > shorter[:, None]
        sums = (logps * torch.where(own, ld_alpha, 1.0)).sum(1)
    for name, rows in (("chosen", chosen), ("rejected", rejected)):
        results[f"{name}_logps"] = sums[rows]
        results[f"{name}_completion_token_counts"] = counts[rows]
        if "mean_logits" in output:
            results[f"mean_{name}_logits"] = output["mean_logits"][rows].sum() / counts[rows].sum()
    if "aux_loss" in output:
        results["aux_loss"] = output["aux_loss"]
    return results
