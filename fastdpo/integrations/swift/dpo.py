"""ms-swift's DPOTrainer, patched where it scores a batch, in `concatenated_forward`.

Training, evaluation and the reference all call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ...models.calls import counting_calls_as
from ..scored_rows import ScoredRows, score
from .batches import from_logits
from .line import SCORES, SwiftLine


class SwiftDPOLine(SwiftLine):
    relies_on = ("concatenated_forward", *SCORES)
    replaced = ("concatenated_forward",)

    def concatenated_forward(
        self, stock: Callable, trainer: Any, model: Any, batch: dict[str, Any], is_ref_model: bool = False
    ) -> dict[str, Any]:
        if not self.fuses(trainer, model):
            return stock(trainer, model, batch, is_ref_model)

        def of_model(called: Any) -> dict[str, Any]:
            return stock(trainer, called, batch, is_ref_model)

        padding_free = trainer.template.padding_free
        inputs = self.inputs_of(trainer, batch, model, router_logits=trainer.aux_loss_enabled)
        results = functools.partial(_results, None if is_ref_model else trainer.args.ld_alpha)
        with counting_calls_as("reference") if is_ref_model else nullcontext():
            return score(model, self.name, inputs, results, from_logits(of_model, model, inputs, padding_free))


def _results(ld_alpha: float | None, rows: ScoredRows) -> dict[str, Any]:
    """The return value of ms-swift."""
    sums = rows.sums(None if ld_alpha is None else rows.ld_weights(ld_alpha))
    halves = dict(zip(("chosen", "rejected"), zip(rows.halves(), sums.chunk(2), strict=True), strict=True))
    results = {"nll_loss": rows.halves()[0].nll()}
    for name, (half, logps) in halves.items():
        results[f"{name}_logps"] = logps
        results[f"{name}_completion_token_counts"] = half.counts()
        if rows.mean_logits is not None:
            results[f"mean_{name}_logits"] = half.mean_logit()
    if rows.aux_loss is not None:
        results["aux_loss"] = rows.aux_loss
    return results
