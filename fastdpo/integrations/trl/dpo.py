"""TRL's DPOTrainer since its rewrite, which prepares its models by `add_fused_lm_head`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from ...models import forward
from ...models.fallback import counting_calls_as, logger
from ...models.forward import Request, ScoredBatch
from ...models.router import router_loss
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
from . import precompute
from .ledgers import discard_states, ledger_of
from .memory import ReferenceMemory
from .names import DPO
from .padding_free import without_padding_free

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from trl.trainer.dpo_trainer import DPOTrainer

_HEAD_PARAMETERS = ["model", "temperature", "cast_lm_head_to_fp32", "outputs"]
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
_STATISTICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
_OUTPUT_FIELDS = {"loss", "log_probs", "label_mask", "aux_loss", *_STATISTICS}
_COLLATOR_FIELDS = {"pad_token_id", "max_length", "truncation_mode", "pad_to_multiple_of", "return_tensors"}

_COMPUTES_METRICS = (
    *("_compute_loss", "compute_loss", "training_step", "prediction_step", "store_flos", "evaluation_loop", "_metrics"),
)
_PATH = ("compute_loss", "_compute_loss", "fused_lm_head")
_METRICS = "_metrics"
_TOKENS = "_total_train_tokens"

_replacements = Replacements()
_trainers: weakref.WeakSet[DPOTrainer] = weakref.WeakSet()
_leaves_models: ContextVar[bool] = ContextVar("fastdpo_leaves_models", default=False)
"""Whether the trainer that is being created bypasses the patched functions."""


class _DPOState(NamedTuple):
    """The state of a trainer that was created after `patch()`."""

    ledger: Ledger
    memory: ReferenceMemory


def unsupported_reason() -> str | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import dpo_trainer, utils

    trainer = dpo_trainer.DPOTrainer
    for owner, name, expected in (
        (dpo_trainer, "add_fused_lm_head", _HEAD_PARAMETERS),
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
    for kind, expected in (
        (utils.FusedCausalLMOutput, _OUTPUT_FIELDS),
        (dpo_trainer.DataCollatorForPreference, _COLLATOR_FIELDS),
    ):
        fields = {field.name for field in dataclasses.fields(kind)}
        if fields != expected:
            return f"{kind.__name__} must have the fields {sorted(expected)}; got {sorted(fields)}"
    return None


def trainer_class() -> type[DPOTrainer]:
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def enable(options: PatchOptions) -> None:
    from trl.trainer import dpo_trainer

    stock_add = getattr(dpo_trainer, "add_fused_lm_head")  # noqa: B009
    stock_reference = dpo_trainer.DPOTrainer.compute_ref_log_probs
    stock_precompute = dpo_trainer.DPOTrainer._precompute_ref_logps
    stock_init = dpo_trainer.DPOTrainer.__init__
    stock_create = dpo_trainer.DPOTrainer.create_accelerator_and_postprocess
    stock_loss = dpo_trainer.DPOTrainer._compute_loss
    codes = codes_of(stock_loss)

    @functools.wraps(stock_add)
    def add_fused_lm_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",)):
        forward.uninstall(model)  # otherwise the fused forward of another trainer would stay inside TRL's
        stock_add(model, temperature, cast_lm_head_to_fp32, outputs)
        if _leaves_models.get():
            return
        request = Request(
            DPO,
            role="policy" if len(outputs) > 1 else "reference",  # only the policy's statistics feed metrics
            outputs=tuple(name for name in outputs if name in _STATISTICS),
            temperature=temperature,
            float32_head=cast_lm_head_to_fp32,
            share_prompts=options.share_prompts,
            memory_budget=options.memory_budget,
        )
        forward.install(model, request, functools.partial(_make_output, model.config))

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
            token = _leaves_models.set(True)
            try:
                stock_init(self, *args, **kwargs)
            finally:
                _leaves_models.reset(token)
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

    _replacements.put(dpo_trainer, "add_fused_lm_head", add_fused_lm_head)
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


def _make_output(config: PretrainedConfig, scored: ScoredBatch, kwargs: dict) -> object:
    from trl.trainer.utils import FusedCausalLMOutput

    logps = scored.logps
    count = kwargs.get("num_items_in_batch")
    if count is None:
        count = scored.label_mask.sum().clamp(min=1)
    loss, aux_loss = -logps.logps.sum() / count, None
    if scored.router_logits is not None:
        aux_loss = router_loss(config, scored.router_logits, scored.multiplicity)
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(
        loss=loss,
        log_probs=logps.logps,
        label_mask=scored.label_mask,
        aux_loss=aux_loss,
        **{name: getattr(logps, name) for name in _STATISTICS},
    )
