"""TRL's DPOTrainer since its rewrite, which prepares its models by `add_fused_lm_head`."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ...models import forward
from ...models.fallback import counting_calls_as, logger
from ..deferred_metrics import (
    codes_of,
    deferring,
    is_overridden,
    running_total,
    settle_where_trl_communicates,
    shown_metrics,
    stored,
)
from ..protocol import STATE, PatchOptions
from ..replacements import Replacements
from ..signatures import first_difference
from . import fused_head, precompute
from .created_trainers import CreatedTrainers, TrainerState
from .ledgers import ledger_of
from .memory import ReferenceMemory
from .names import DPO
from .padding_free import without_padding_free

if TYPE_CHECKING:
    from trl.trainer.dpo_trainer import DPOTrainer

_PARAMETERS = {
    "compute_ref_log_probs": ["self", "model", "inputs"],
    "_precompute_ref_logps": ["self", "dataset", "name", "batch_size"],
    "_compute_loss": ["self", "model", "inputs", "return_outputs"],
    "store_flos": ["self"],
    "evaluation_loop": [
        *("self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix")
    ],
    "create_accelerator_and_postprocess": ["self"],
    "__init__": [
        *("self", "model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
        *("compute_metrics", "callbacks", "optimizers", "quantization_config", "peft_config"),
    ],
}
_COLLATOR_FIELDS = {"pad_token_id", "max_length", "truncation_mode", "pad_to_multiple_of", "return_tensors"}

_COMPUTES_METRICS = (
    *("_compute_loss", "compute_loss", "training_step", "prediction_step", "store_flos", "evaluation_loop", "_metrics"),
)
_PATH = ("compute_loss", "_compute_loss", "fused_lm_head")
_METRICS = "_metrics"
_TOKENS = "_total_train_tokens"

_replacements = Replacements()
_trainers = CreatedTrainers(DPO, _PATH)


@dataclass(eq=False, kw_only=True)
class _DPOState(TrainerState):
    memory: ReferenceMemory


def unsupported_reason() -> str | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import dpo_trainer

    difference = first_difference(dpo_trainer.DPOTrainer, _PARAMETERS)
    if difference is not None:
        return difference
    names = {field.name for field in fields(dpo_trainer.DataCollatorForPreference)}
    if names != _COLLATOR_FIELDS:
        return f"DataCollatorForPreference must have the fields {sorted(_COLLATOR_FIELDS)}; got {sorted(names)}"
    return fused_head.unsupported_reason(dpo_trainer)


def trainer_class() -> type[DPOTrainer]:
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def enable(options: PatchOptions) -> None:
    from trl.trainer import dpo_trainer

    stock_reference = dpo_trainer.DPOTrainer.compute_ref_log_probs
    stock_precompute = dpo_trainer.DPOTrainer._precompute_ref_logps
    stock_init = dpo_trainer.DPOTrainer.__init__
    stock_loss = dpo_trainer.DPOTrainer._compute_loss
    codes = codes_of(stock_loss)

    @functools.wraps(stock_reference)
    def compute_ref_log_probs(self, model, inputs):
        with counting_calls_as("reference"):
            return stock_reference(self, model, inputs)

    @functools.wraps(stock_precompute)
    def _precompute_ref_logps(self, dataset, name, batch_size):
        if not precompute.is_supported(self, dataset):
            return stock_precompute(self, dataset, name, batch_size)
        return precompute.with_precomputed_logps(self, dataset, name, batch_size)

    @functools.wraps(stock_loss)
    def _compute_loss(self, model, inputs, return_outputs):
        state: _DPOState | None = vars(self).get(STATE)
        if state is None:  # created before patch()
            return stock_loss(self, model, inputs, return_outputs)
        with state.memory.serving(self, inputs) as inputs:
            try:
                with deferring(self.accelerator, state.ledger, codes):
                    result = stock_loss(self, model, inputs, return_outputs)
            finally:
                for metrics in stored(self, _METRICS).values():
                    state.ledger.take(metrics)
        state.ledger.settle_if_due(read=is_overridden(self, dpo_trainer.DPOTrainer, _COMPUTES_METRICS))
        return result

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        config = inspect.signature(stock_init).bind(self, *args, **kwargs).arguments.get("args")
        if vars(self)[STATE] is None or config is None or not config.padding_free:
            stock_init(self, *args, **kwargs)
            return
        with without_padding_free(config):  # otherwise TRL would warn that it pads
            stock_init(self, *args, **kwargs)
        self.padding_free = forward.is_fused(self.model)
        if not self.padding_free:
            logger.warning("%s: padding_free=True, but batches are padded for the reason logged above", DPO)

    def new_state() -> _DPOState:
        return _DPOState(memory=ReferenceMemory(options.reference_memory))

    fused_head.replace(_replacements, dpo_trainer, DPO, options, groups="pairs")
    _replacements.put(dpo_trainer.DPOTrainer, "__init__", __init__)
    _trainers.watch(_replacements, dpo_trainer.DPOTrainer, new_state=new_state)
    _replacements.put(dpo_trainer.DPOTrainer, "_compute_loss", _compute_loss)
    settle_where_trl_communicates(_replacements, dpo_trainer.DPOTrainer, ledger_of)
    _replacements.put(dpo_trainer.DPOTrainer, _METRICS, shown_metrics(_METRICS, ledger_of, codes))
    _replacements.put(dpo_trainer.DPOTrainer, _TOKENS, running_total(_TOKENS, ledger_of, codes))
    _replacements.put(dpo_trainer.DPOTrainer, "compute_ref_log_probs", compute_ref_log_probs)
    _replacements.put(dpo_trainer.DPOTrainer, "_precompute_ref_logps", _precompute_ref_logps)


def disable() -> None:
    _replacements.undo()
    _trainers.discard_states()
