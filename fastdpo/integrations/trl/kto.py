"""TRL's KTOTrainer, which prepares its models by `add_fused_lm_head`.

For the loss "kto", TRL estimates a KL term from each prompt with the completion of another one, so
that a step makes four calls: policy and reference, each for the completions and for the KL term.
Here the reference has one call for both, in which they share their prompts.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...models.fallback import counting_calls_as
from ...reasons import Reason
from .. import evidence
from ..bypass import is_overridden
from ..merged_rows import equal_when_merged, merged
from ..protocol import STATE, PatchOptions
from ..replacements import Replacements, temporarily
from ..signatures import first_difference
from . import fused_head
from .created_trainers import CreatedTrainers
from .names import KTO
from .reference import reference_of

if TYPE_CHECKING:
    from trl.trainer.kto_trainer import KTOTrainer

_PARAMETERS = {
    "compute_ref_log_probs": ["self", "model", "inputs"],
    "_compute_kl_logps": ["self", "model", "batch"],
    "_compute_loss": ["self", "model", "inputs", "return_outputs"],
    "create_accelerator_and_postprocess": ["self"],
}
_PATH = ("compute_loss", "_compute_loss", "fused_lm_head")
_RUNS_THE_REFERENCE = ("compute_ref_log_probs", "_compute_kl_logps", "_compute_loss")
_ROWS = ("input_ids", "attention_mask", "completion_mask")
_INPUTS = {*_ROWS, *(f"KL_{name}" for name in _ROWS), "label"}

_replacements = Replacements()
_trainers = CreatedTrainers(KTO, _PATH)


def unsupported_reason() -> Reason | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import kto_trainer

    return first_difference(kto_trainer.KTOTrainer, _PARAMETERS) or fused_head.unsupported_reason(kto_trainer)


def trainer_class() -> type[KTOTrainer]:
    from trl.trainer.kto_trainer import KTOTrainer

    return KTOTrainer


def enable(options: PatchOptions) -> None:
    from trl.trainer import kto_trainer

    trainer = kto_trainer.KTOTrainer
    stock_reference = trainer.compute_ref_log_probs
    stock_loss = trainer._compute_loss

    @functools.wraps(stock_reference)
    def compute_ref_log_probs(self, model, inputs, *args, **kwargs):  # some are of a newer TRL
        with counting_calls_as("reference"):
            if not _merges(self, model, inputs):
                return stock_reference(self, model, inputs, *args, **kwargs)
            with temporarily(self, calculate_KL=False):
                logps, _ = stock_reference(self, model, _merged(inputs))
        completion_logps, KL_logps = logps.chunk(2)
        return completion_logps, KL_logps

    @functools.wraps(stock_loss)
    def _compute_loss(self, model, inputs, return_outputs, *args, **kwargs):
        reference = reference_of(self)
        overridden = is_overridden(self, trainer, ("compute_ref_log_probs", "_compute_kl_logps"))
        if self.precompute_ref_logps or overridden or not _merges(self, reference, inputs):
            return stock_loss(self, model, inputs, return_outputs, *args, **kwargs)
        logps, KL_logps = self.compute_ref_log_probs(reference, inputs)
        with temporarily(self, precompute_ref_logps=True):  # TRL then takes them from the batch
            return stock_loss(self, model, {**inputs, "ref_logps": logps, "ref_KL_logps": KL_logps}, return_outputs)

    # The policy's call for the KL term has no gradient.
    fused_head.replace(_replacements, kto_trainer, KTO, options, groups="prompts", kind_without_gradient="policy")
    _trainers.watch(_replacements, trainer)
    _replacements.put(trainer, "compute_ref_log_probs", compute_ref_log_probs)
    _replacements.put(trainer, "_compute_loss", _compute_loss)


def disable() -> None:
    _replacements.undo()
    _trainers.discard_states()


def _merges(trainer: KTOTrainer, reference: Any, inputs: dict[str, Any]) -> bool:
    """Whether the two calls of the reference for a batch can be one fused call with equal results."""
    if vars(trainer).get(STATE) is None or not trainer.calculate_KL:
        return False
    if not all(evidence.is_tested(getattr(type(trainer), name)) for name in _RUNS_THE_REFERENCE):
        return False
    if not {name for name, x in inputs.items() if x is not None} <= _INPUTS:
        return False
    return equal_when_merged(reference, inputs["input_ids"], inputs["KL_input_ids"])


def _merged(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of a batch, [B, L1], and below them those of its KL term, [B, L2], as [2B, max(L1, L2)]."""
    completions, KL = ({name: inputs[f"{prefix}{name}"] for name in _ROWS} for prefix in ("", "KL_"))
    return merged(completions, KL)
