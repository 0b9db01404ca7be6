"""ms-swift's trainers without a reference, CPOTrainer (CPO and SimPO) and ORPOTrainer.

Both take TRL's `concatenated_forward`, whose model call ms-swift makes itself. They log the mean of
all logits of a batch, with those of prompts and padding, which are not computed here: `logits/*` are
means over the tokens that are scored, as in ms-swift's DPOTrainer.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet
from torch import Tensor

from ...reasons import Reason
from .. import evidence
from ..bypass import is_overridden
from ..scored_rows import ScoredRows
from ..versions import unsupported_version_reason
from .batches import OutputOfRows
from .line import SwiftLine

_TRL = ">=0.28,<0.30"
"""The tested versions of TRL, whose losses read means of logits in place of logits."""

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "batch"],
    "get_batch_loss_metrics": ["self", "model", "batch", "train_eval"],
}


class SwiftReferenceFreeLine(SwiftLine):
    """The line of one of the two trainers."""

    parameters = _PARAMETERS
    path = ("get_batch_loss_metrics", "concatenated_forward")

    def unsupported_reason(self) -> Reason | None:
        reason = super().unsupported_reason()
        if reason is None and evidence.is_newer(self.trainer_class()):
            version = importlib.metadata.version("trl")
            if version not in SpecifierSet(_TRL):
                return unsupported_version_reason("trl", version, [_TRL])
        return reason

    def replace(self) -> None:
        self.wrap("concatenated_forward", self.concatenated_forward)

    def concatenated_forward(self, stock: Callable, trainer: Any, model: Any, batch: dict[str, Any]) -> Any:
        if not self.calls(trainer, model):  # created before patch()
            return stock(trainer, model, batch)
        inputs = self.inputs_of(trainer, batch, model, router_logits=trainer.aux_loss_enabled)
        if is_overridden(trainer, self.trainer_class(), ("get_batch_loss_metrics",)):
            inputs = Reason("may-read-logits", function=f"{type(trainer).__name__}.get_batch_loss_metrics")

        def from_logits(of_rows):
            if of_rows is not model and not isinstance(inputs, Reason):
                of_rows = OutputOfRows(of_rows, inputs, padding_free=False)
            return stock(trainer, of_rows, batch)

        return self.score(model, inputs, functools.partial(_results, trainer), from_logits)


def _results(trainer: Any, rows: ScoredRows) -> tuple[Tensor, ...]:
    """The return value of TRL, with the means of the logits in place of the logits."""
    averages = getattr(trainer, "loss_type", "orpo") in ("orpo", "ipo", "simpo")  # ORPOTrainer has no loss_type
    logps = rows.means() if averages else rows.sums()
    halves = rows.halves()
    nll_loss = logps.new_zeros(()) if getattr(trainer, "cpo_alpha", None) == 0 else halves[0].nll()
    means = (half.mean_logit() for half in halves)
    return *logps.chunk(2), *means, nll_loss, *(() if rows.aux_loss is None else (rows.aux_loss,))
