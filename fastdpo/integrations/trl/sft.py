"""TRL's SFTTrainer, which prepares its model by `add_fused_lm_head`: packed, with the fused head.

Rows share a prompt if the batch has it several times. A trainer whose batches TRL packs itself, or
whose loss needs logits, is left unpatched.
"""

from __future__ import annotations

from typing import Any

from ...reasons import Reason
from .batches.packed_where_collated import with_packed_batches
from .fused_head import FusedHeadLine

_PARAMETERS = {
    "__init__": [
        *("self", "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
        *("compute_loss_func", "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs"),
        *("preprocess_logits_for_metrics", "quantization_config", "peft_config", "formatting_func"),
    ],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
}


class SFTLine(FusedHeadLine):
    parameters = _PARAMETERS
    replaced = ("get_train_dataloader",)
    get_train_dataloader = with_packed_batches
    path = ("compute_loss", "fused_lm_head")

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
