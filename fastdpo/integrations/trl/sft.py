"""TRL's SFTTrainer, which prepares its model by `add_fused_lm_head`: packed, with the fused head.

A trainer whose batches TRL packs itself, or whose loss needs logits, is left unpatched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...reasons import Reason
from ..collating import REPLACED
from .fused_head import FusedHeadLine
from .max_tokens.budget import STEPS, Budget


def uncuttable(trainer: Any) -> str | None:
    if trainer.model_accepts_loss_kwargs:
        return None
    return "models whose loss does not take num_items_in_batch, since it then is a mean over the tokens of a batch"


class SFTLine(FusedHeadLine):
    replaced = ("compute_loss", *REPLACED)
    # The loss of a step is a sum over its tokens, which the trainer divides by their number in all of its batches.
    cutting = Budget(
        relies_on=(*STEPS, "compute_loss", ":DataCollatorForLanguageModeling.torch_call"),
        is_sum=True,
        entries=frozenset({"input_ids", "attention_mask", "labels"}),
        fields=("log_probs", "label_mask", "entropy", "is_top1"),
        uncuttable=uncuttable,
    )

    def compute_loss(self, stock: Callable, trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(trainer, self.noting(trainer, model), *args, **kwargs)

    def disabled_reason(self, arguments: dict[str, Any]) -> Reason | None:
        config = arguments.get("args")
        for option in ("packing", "padding_free"):
            if getattr(config, option, False):
                return Reason("packed-by-trl", option=option)
        if arguments.get("compute_loss_func") is not None:
            return Reason("needs-logits", what="compute_loss_func")
        if getattr(config, "label_smoothing_factor", 0) and getattr(config, "loss_type", "nll") == "nll":
            return Reason("needs-logits", what="label smoothing")
        return None
