"""TRL's SFTTrainer, which prepares its model by `add_fused_lm_head`: packed, with the fused head.

Rows share a prompt if the batch has it several times. A trainer whose batches TRL packs itself, or
whose loss needs logits, is left unpatched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...reasons import Reason
from ..protocol import PatchOptions
from ..replacements import Replacements
from ..signatures import first_difference
from . import fused_head
from .created_trainers import CreatedTrainers
from .names import SFT

if TYPE_CHECKING:
    from trl.trainer.sft_trainer import SFTTrainer

_PARAMETERS = {
    "__init__": [
        *("self", "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
        *("compute_loss_func", "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs"),
        *("preprocess_logits_for_metrics", "quantization_config", "peft_config", "formatting_func"),
    ],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "create_accelerator_and_postprocess": ["self"],
}
PATH = ("compute_loss", "fused_lm_head")

_replacements = Replacements()
_trainers = CreatedTrainers(SFT, PATH)


def unsupported_reason() -> Reason | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import sft_trainer

    return first_difference(sft_trainer.SFTTrainer, _PARAMETERS) or fused_head.unsupported_reason(sft_trainer)


def trainer_class() -> type[SFTTrainer]:
    from trl.trainer.sft_trainer import SFTTrainer

    return SFTTrainer


def enable(options: PatchOptions) -> None:
    from trl.trainer import sft_trainer

    fused_head.replace(_replacements, sft_trainer, SFT, options, groups="prompts")
    _trainers.watch(_replacements, sft_trainer.SFTTrainer, disabled_reason=_disabled_reason)


def disable() -> None:
    _replacements.undo()
    _trainers.discard_states()


def _disabled_reason(arguments: dict[str, Any]) -> Reason | None:
    """Why a trainer with these arguments is left unpatched."""
    config = arguments.get("args")
    for option in ("packing", "padding_free"):
        if getattr(config, option, False):
            return Reason("packed-by-trl", option=option)
    if arguments.get("compute_loss_func") is not None:
        return Reason("needs-logits", what="compute_loss_func")
    if getattr(config, "label_smoothing_factor", 0) and getattr(config, "loss_type", "nll") == "nll":
        return Reason("needs-logits", what="label smoothing")
    return None
