"""TRL's DPOTrainer since TRL 1.15, which prepares its models by `add_fused_lm_head`."""

from __future__ import annotations

from dataclasses import fields

from ...reasons import Reason
from ..signatures import signature_difference
from .fused_head import FusedHeadLine
from .rewritten_dpo import PARAMETERS, RewrittenDPOLine

_PARAMETERS = {"compute_ref_log_probs": ["self", "model", "inputs"], **PARAMETERS}
_INIT_PARAMETERS = [
    *("self", "model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    *("compute_metrics", "callbacks", "optimizers", "quantization_config", "peft_config"),
]
_COLLATOR_FIELDS = {"pad_token_id", "max_length", "truncation_mode", "pad_to_multiple_of", "return_tensors"}


class DPOLine(RewrittenDPOLine, FusedHeadLine):
    parameters = _PARAMETERS
    path = ("compute_loss", "_compute_loss", "fused_lm_head")
    images = True

    def unsupported_reason(self) -> Reason | None:
        difference = super().unsupported_reason()
        difference = difference or signature_difference(self.trainer_class(), "__init__", _INIT_PARAMETERS, exact=False)
        if difference is not None:
            return difference
        collator = self.module().DataCollatorForPreference
        difference = signature_difference(collator, "torch_call", ["self", "examples"])
        if difference is not None:
            return difference
        names = {field.name for field in fields(collator)}
        if names != _COLLATOR_FIELDS:
            rule = f"DataCollatorForPreference must have the fields {sorted(_COLLATOR_FIELDS)}"
            return Reason("different-code", difference=f"{rule}; got {sorted(names)}")
        return None

    def replace(self) -> None:
        FusedHeadLine.replace(self)
        RewrittenDPOLine.replace(self)
