"""ms-swift's trainers without a reference, CPOTrainer (CPO and SimPO) and ORPOTrainer.

Both take TRL's `concatenated_forward`, whose model call ms-swift makes itself. They log the mean of
all logits of a batch, with those of prompts and padding, which are not computed here: `logits/*` are
means over the tokens that are scored, as in ms-swift's DPOTrainer.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..bypass import is_overridden
from ..concatenated import Inputs, install, score
from ..protocol import PatchOptions
from .batches import OutputOfRows
from .line import SwiftLine


def line_of(trainer: str) -> SwiftLine:
    """The trainer line of one of the two trainers."""
    return SwiftLine(
        trainer,
        path=("get_batch_loss_metrics", "concatenated_forward"),
        parameters={
            "concatenated_forward": ["self", "model", "batch"],
            "get_batch_loss_metrics": ["self", "model", "batch", "train_eval"],
        },
    )


def enable(line: SwiftLine, options: PatchOptions) -> None:
    trainer = line.trainer_class()
    stock_forward = trainer.concatenated_forward

    @functools.wraps(stock_forward)
    def concatenated_forward(self, model, batch):
        if not line.calls(self, model):  # created before patch()
            return stock_forward(self, model, batch)
        inputs = line.inputs_of(self, batch, model, router_logits=self.aux_loss_enabled)
        if is_overridden(self, trainer, ("get_batch_loss_metrics",)):
            inputs = Reason("may-read-logits", function=f"{type(self).__name__}.get_batch_loss_metrics")

        def stock(of_rows):
            if of_rows is not model and not isinstance(inputs, Reason):
                of_rows = OutputOfRows(of_rows, inputs, padding_free=False)
            return stock_forward(self, of_rows, batch)

        return score(model, line.name, inputs, functools.partial(_results, self), stock)

    line.watch(lambda trainer, models: install(models, line.name, options))
    line.replacements.put(trainer, "concatenated_forward", concatenated_forward)


def _results(trainer: Any, inputs: Inputs, output: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The return value of TRL, with the means of the logits in place of the logits."""
    logps, logits = output["log_probs"], output["mean_logits"]  # [2B, L-1], zero where nothing is scored
    counts = (inputs["labels"][:, 1:].to(logps.device) != IGNORE_INDEX).sum(1)  # [2B]
    chosen, rejected = slice(0, len(counts) // 2), slice(len(counts) // 2, None)
    sums = logps.sum(1)
    nll_loss = -sums[chosen].sum() / counts[chosen].sum()
    if getattr(trainer, "cpo_alpha", None) == 0:
        nll_loss = sums.new_zeros(())
    if getattr(trainer, "loss_type", "orpo") in ("orpo", "ipo", "simpo"):  # ORPOTrainer has no loss_type
        sums = sums / counts
    means = (logits[rows].sum() / counts[rows].sum() for rows in (chosen, rejected))
    aux_loss = (output["aux_loss"],) if "aux_loss" in output else ()
    return sums[chosen], sums[rejected], *means, nll_loss, *aux_loss
