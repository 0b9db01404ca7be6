"""TRL's DPOTrainer since TRL 1.15, which prepares its models by `add_fused_lm_head`."""

from __future__ import annotations

from dataclasses import fields

from ...reasons import Reason
from ..protocol import PatchOptions
from ..replacements import Replacements
from ..signatures import signature_difference
from . import fused_head, rewritten_dpo
from .created_trainers import CreatedTrainers
from .names import DPO
from .rewritten_dpo import trainer_class

__all__ = ["disable", "enable", "trainer_class", "unsupported_reason"]

_PARAMETERS = {"compute_ref_log_probs": ["self", "model", "inputs"]}
_INIT_PARAMETERS = [
    *("self", "model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    *("compute_metrics", "callbacks", "optimizers", "quantization_config", "peft_config"),
]
_COLLATOR_FIELDS = {"pad_token_id", "max_length", "truncation_mode", "pad_to_multiple_of", "return_tensors"}

_replacements = Replacements()
_trainers = CreatedTrainers(DPO, ("compute_loss", "_compute_loss", "fused_lm_head"))


def unsupported_reason() -> Reason | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import dpo_trainer

    difference = rewritten_dpo.unsupported_reason(_PARAMETERS) or signature_difference(
        rewritten_dpo.trainer_class(), "__init__", _INIT_PARAMETERS, exact=False
    )
    if difference is not None:
        return difference
    collator = dpo_trainer.DataCollatorForPreference
    difference = signature_difference(collator, "torch_call", ["self", "examples"])
    if difference is not None:
        return difference
    names = {field.name for field in fields(collator)}
    if names != _COLLATOR_FIELDS:
        difference = f"DataCollatorForPreference must have the fields {sorted(_COLLATOR_FIELDS)}; got {sorted(names)}"
        return Reason("different-code", difference=difference)
    return fused_head.unsupported_reason(dpo_trainer)


def enable(options: PatchOptions) -> None:
    from trl.trainer import dpo_trainer

    fused_head.replace(_replacements, dpo_trainer, DPO, options, groups="content", images=True)
    rewritten_dpo.replace(_replacements, _trainers, options)


def disable() -> None:
    _replacements.undo()
    _trainers.discard_states()
