"""TRL's KTOTrainer, which prepares its models by `add_fused_lm_head`.

For the loss "kto", TRL estimates a KL term from each prompt with the completion of another one, so
that a step makes four calls: policy and reference, each for the completions and for the KL term.
Here the reference has one call for both, in which they share their prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...models import layouts
from ...models.calls import counting_calls_as
from .. import evidence
from ..bypass import STATE, is_overridden
from ..merged_rows import equal_when_merged, merged
from ..replacements import temporarily
from .batches.kto_budget import KTOBudget
from .model_state import unwrapping
from .reference import reference_of
from .row_budget_line import RowBudgetLine

if TYPE_CHECKING:
    from trl.trainer.kto_trainer import KTOTrainer

_PARAMETERS = {
    "compute_ref_log_probs": ["self", "model", "inputs"],
    "_compute_kl_logps": ["self", "model", "batch"],
    "_compute_loss": ["self", "model", "inputs", "return_outputs"],
    "training_step": ["self", "args", "kwargs"],
}
_RUNS_THE_REFERENCE = ("compute_ref_log_probs", "_compute_kl_logps", "_compute_loss")
_ROWS = ("input_ids", "attention_mask", "completion_mask")
_INPUTS = {*_ROWS, *(f"KL_{name}" for name in _ROWS), "label"}


class KTOLine(RowBudgetLine):
    parameters = _PARAMETERS
    replaced = ("compute_ref_log_probs", "_compute_loss")
    path = ("compute_loss", "_compute_loss", "fused_lm_head")
    budget_class = KTOBudget
    kind_without_gradient = "policy"  # of the policy's calls, that for the KL term has no gradient

    def compute_ref_log_probs(
        self, stock: Callable, trainer: KTOTrainer, model: Any, inputs: dict, *args: Any, **kwargs: Any
    ) -> Any:
        with counting_calls_as("reference"), unwrapping(trainer.accelerator):
            if not _merges(trainer, model, inputs):
                return stock(trainer, model, inputs, *args, **kwargs)
            with temporarily(trainer, calculate_KL=False):
                logps, _ = stock(trainer, model, _merged(inputs))
        completion_logps, KL_logps = logps.chunk(2)
        return completion_logps, KL_logps

    def _compute_loss(
        self,
        stock: Callable,
        trainer: KTOTrainer,
        model: Any,
        inputs: dict,
        return_outputs: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        budget = self.budget_of(trainer)
        if budget is not None and budget.is_running:
            with layouts.labelling(inputs["completion_mask"]):
                return stock(trainer, budget.scoring(model), inputs, return_outputs, *args, **kwargs)
        reference = reference_of(trainer)
        overridden = is_overridden(trainer, self.trainer_class(), ("compute_ref_log_probs", "_compute_kl_logps"))
        if trainer.precompute_ref_logps or overridden or not _merges(trainer, reference, inputs):
            return stock(trainer, model, inputs, return_outputs, *args, **kwargs)
        logps, KL_logps = trainer.compute_ref_log_probs(reference, inputs)
        with temporarily(trainer, precompute_ref_logps=True):  # TRL then takes them from the batch
            return stock(trainer, model, {**inputs, "ref_logps": logps, "ref_KL_logps": KL_logps}, return_outputs)


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
