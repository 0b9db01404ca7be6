"""TRL's DPOTrainer since TRL 1.15, which prepares its models by `add_fused_lm_head`."""

from __future__ import annotations

from typing import cast

from ...reasons import Reason
from ..signatures import field_difference, signature_difference
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
        collator = getattr(self.module(), "DataCollatorForPreference", None)
        return (
            super().unsupported_reason()
            or signature_difference(self.trainer_class(), "__init__", _INIT_PARAMETERS, exact=False)
            or signature_difference(collator, "torch_call", ["self", "examples"])
            or field_difference(cast(type, collator), _COLLATOR_FIELDS)
        )
