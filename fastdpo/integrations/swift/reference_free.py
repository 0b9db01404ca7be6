"""ms-swift's trainers without a reference, CPOTrainer (CPO and SimPO) and ORPOTrainer.

Both take TRL's `concatenated_forward`, whose model call ms-swift makes itself. They log the mean of
all logits of a batch, with those of prompts and padding, which are not computed here: `logits/*` are
means over the tokens that are scored, as in ms-swift's DPOTrainer.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet

from ...reasons import Reason
from ..admission.versions import unsupported_version_reason
from ..bypass import is_overridden
from ..scored_rows import score
from ..trl.reference_free import results_of
from .batches import from_logits
from .line import SwiftLine

_TRL = ">=0.28,<0.30"
"""The tested versions of TRL, whose losses read means of logits in place of logits."""


class SwiftReferenceFreeLine(SwiftLine):
    """The line of one of the two trainers."""

    relies_on = ("concatenated_forward",)
    replaced = ("concatenated_forward",)

    def unsupported_reason(self) -> Reason | None:
        reason = super().unsupported_reason()
        if reason is None and self.is_newer:
            version = importlib.metadata.version("trl")
            if version not in SpecifierSet(_TRL):
                return unsupported_version_reason("trl", version, [_TRL])
        return reason

    def concatenated_forward(self, stock: Callable, trainer: Any, model: Any, batch: dict[str, Any]) -> Any:
        if not self.fuses(trainer, model):
            return stock(trainer, model, batch)
        inputs = self.inputs_of(trainer, batch, model, router_logits=trainer.aux_loss_enabled)
        if is_overridden(trainer, self.trainer_class(), ("get_batch_loss_metrics",)):
            inputs = Reason("may-read-logits", function=f"{type(trainer).__name__}.get_batch_loss_metrics")
        of_logits = from_logits(lambda called: stock(trainer, called, batch), model, inputs)
        return score(model, self.name, inputs, lambda rows: results_of(self, trainer, rows.mask, rows), of_logits)
