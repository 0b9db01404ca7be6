"""LLaMA-Factory's DPOTrainer, patched where it scores a batch, in `concatenated_forward`.

Its losses (DPO and its variants, ORPO and SimPO) are computed from the same log-probabilities by
its own functions.
"""

# pyright: reportMissingImports=false
# Types are checked in an environment without LLaMA-Factory.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...reasons import Reason
from ..scored_rows import ScoredRows, label_mask
from .line import INPUTS, FactoryLine, mean_logits_of

if TYPE_CHECKING:
    from llamafactory.train.dpo.trainer import CustomDPOTrainer

_AVERAGED = ("ipo", "orpo", "simpo")
"""The losses of mean log-probabilities."""

_LOGITS = ("chosen_logits", "rejected_logits")


class FactoryDPOLine(FactoryLine):
    class_name = "CustomDPOTrainer"
    relies_on = ("concatenated_forward", ":get_batch_logps", "get_batch_loss_metrics")
    replaced = ("concatenated_forward", "log")

    def unsupported_reason(self) -> Reason | None:
        from llamafactory.extras.misc import is_env_enabled

        return Reason("use-mca") if is_env_enabled("USE_MCA") else super().unsupported_reason()

    def concatenated_forward(
        self,
        stock: Callable,
        trainer: CustomDPOTrainer,
        model: Any,
        batch: dict[str, Tensor],
        is_ref_model: bool = False,
    ) -> dict[str, Any]:
        labels = batch["labels"]  # which stock removes from the batch
        output = self.output_of(trainer, model, batch, batch.keys() - {*INPUTS})
        if isinstance(output, ScoredRows):
            return _results(trainer, output, is_ref_model)
        called = model if output is None else lambda **inputs: output
        results = stock(trainer, called, batch, is_ref_model)
        if self.state_of(trainer).has_fused:  # other batches are: log the same means for this one
            logits = torch.cat([results[name] for name in _LOGITS])
            results |= _logits(mean_logits_of(logits), label_mask(labels).to(logits.device))
        return results


def _results(trainer: CustomDPOTrainer, rows: ScoredRows, is_ref_model: bool) -> dict[str, Any]:
    """The return value of LLaMA-Factory. Of the logits, it has one mean for each scored token of a completion."""
    sums = rows.sums()
    if trainer.ld_alpha is not None and not is_ref_model:  # which numbers all tokens from the first scored one
        position = torch.arange(rows.mask.shape[1], device=rows.mask.device)
        sums = rows.sums(rows.ld_weights(trainer.ld_alpha, position - rows.mask.int().argmax(1)[:, None]))
    means = sums / rows.counts()
    chosen, rejected = (means if trainer.loss_type in _AVERAGED else sums).chunk(2)
    results = {"chosen_logps": chosen, "rejected_logps": rejected, "chosen_logps_avg": means.chunk(2)[0]}
    logits = dict.fromkeys(_LOGITS) if rows.mean_logits is None else _logits(rows.mean_logits, rows.mask)
    return results | logits


def _logits(mean_logits: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The means [2B, L-1] of the logits at the scored tokens of the chosen and of the rejected completions."""
    halves = zip(mean_logits.chunk(2), mask.chunk(2), strict=True)
    return {name: logits[scored] for name, (logits, scored) in zip(_LOGITS, halves, strict=True)}
