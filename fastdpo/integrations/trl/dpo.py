"""TRL's DPOTrainer since its rewrite, which prepares its models by `add_fused_lm_head`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from typing import TYPE_CHECKING, NamedTuple

from ...models import forward
from ...models.fallback import counting_calls_as, logger
from ..bypass import first_log_callback, left_unpatched, report_skipped_init
from ..deferred_metrics import (
    Ledger,
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
from ..signatures import signature_difference
from . import fused_head, precompute
from .ledgers import discard_states, ledger_of
from .memory import ReferenceMemory
from .names import DPO
from .padding_free import without_padding_free

if TYPE_CHECKING:
    from trl.trainer.dpo_trainer import DPOTrainer

_REFERENCE_PARAMETERS = ["self", "model", "inputs"]
_PRECOMPUTE_PARAMETERS = ["self", "dataset", "name", "batch_size"]
_LOSS_PARAMETERS = ["self", "model", "inputs", "return_outputs"]
_FLOS_PARAMETERS = ["self"]
_CREATE_PARAMETERS = ["self"]
_EVALUATION_PARAMETERS = [
    *("self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix")
]
_INIT_PARAMETERS = [
    *("self", "model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    *("compute_metrics", "callbacks", "optimizers", "quantization_config", "peft_config"),
]
_COLLATOR_FIELDS = {"pad_token_id", "max_length", "truncation_mode", "pad_to_multiple_of", "return_tensors"}

_COMPUTES_METRICS = (
    *("_compute_loss", "compute_loss", "training_step", "prediction_step", "store_flos", "evaluation_loop", "_metrics"),
)
_PATH = ("compute_loss", "_compute_loss", "fused_lm_head")
_METRICS = "_metrics"
_TOKENS = "_total_train_tokens"

_replacements = Replacements()
_trainers: weakref.WeakSet[DPOTrainer] = weakref.WeakSet()


class _DPOState(NamedTuple):
    """The state of a trainer that was created after `patch()`."""

    ledger: Ledger
    memory: ReferenceMemory


def unsupported_reason() -> str | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import dpo_trainer

    trainer = dpo_trainer.DPOTrainer
    for owner, name, expected in (
        (trainer, "compute_ref_log_probs", _REFERENCE_PARAMETERS),
        (trainer, "_precompute_ref_logps", _PRECOMPUTE_PARAMETERS),
        (trainer, "_compute_loss", _LOSS_PARAMETERS),
        (trainer, "store_flos", _FLOS_PARAMETERS),
        (trainer, "evaluation_loop", _EVALUATION_PARAMETERS),
        (trainer, "create_accelerator_and_postprocess", _CREATE_PARAMETERS),
        (trainer, "__init__", _INIT_PARAMETERS),
    ):
        difference = signature_difference(owner, name, expected)
        if difference is not None:
            return difference
    fields = {field.name for field in dataclasses.fields(dpo_trainer.DataCollatorForPreference)}
    if fields != _COLLATOR_FIELDS:
        return f"DataCollatorForPreference must have the fields {sorted(_COLLATOR_FIELDS)}; got {sorted(fields)}"
    return fused_head.unsupported_reason(dpo_trainer)


def trainer_class() -> type[DPOTrainer]:
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def enable(options: PatchOptions) -> None:
    from trl.trainer import dpo_trainer

    stock_reference = dpo_trainer.DPOTrainer.compute_ref_log_probs
    stock_precompute = dpo_trainer.DPOTrainer._precompute_ref_logps
    stock_init = dpo_trainer.DPOTrainer.__init__
    stock_create = dpo_trainer.DPOTrainer.create_accelerator_and_postprocess
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
        _trainers.add(self)
        if left_unpatched(self, DPO, dpo_trainer.DPOTrainer, _PATH):
            with fused_head.leaving_models():
                stock_init(self, *args, **kwargs)
            return
        vars(self)[STATE] = _DPOState(Ledger(), ReferenceMemory(options.reference_memory))
        config = inspect.signature(stock_init).bind(self, *args, **kwargs).arguments.get("args")
        if config is None or not config.padding_free:
            stock_init(self, *args, **kwargs)
        else:
            with without_padding_free(config):  # otherwise TRL would warn that it pads
                stock_init(self, *args, **kwargs)
            self.padding_free = forward.is_fused(self.model)
            if not self.padding_free:
                logger.warning("%s: padding_free=True, but batches are padded for the reason logged above", DPO)
        self.add_callback(first_log_callback(self, DPO))

    @functools.wraps(stock_create)
    def create_accelerator_and_postprocess(self):
        _trainers.add(self)
        report_skipped_init(self, DPO, dpo_trainer.DPOTrainer, _PATH)
        stock_create(self)

    fused_head.replace(_replacements, dpo_trainer, DPO, options, groups="pairs")
    _replacements.put(dpo_trainer.DPOTrainer, "__init__", __init__)
    _replacements.put(dpo_trainer.DPOTrainer, "create_accelerator_and_postprocess", create_accelerator_and_postprocess)
    _replacements.put(dpo_trainer.DPOTrainer, "_compute_loss", _compute_loss)
    settle_where_trl_communicates(_replacements, dpo_trainer.DPOTrainer, ledger_of)
    _replacements.put(dpo_trainer.DPOTrainer, _METRICS, shown_metrics(_METRICS, ledger_of, codes))
    _replacements.put(dpo_trainer.DPOTrainer, _TOKENS, running_total(_TOKENS, ledger_of, codes))
    _replacements.put(dpo_trainer.DPOTrainer, "compute_ref_log_probs", compute_ref_log_probs)
    _replacements.put(dpo_trainer.DPOTrainer, "_precompute_ref_logps", _precompute_ref_logps)


def disable() -> None:
    _replacements.undo()
    discard_states(_trainers)
