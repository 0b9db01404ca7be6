"""TRL's DPOTrainer, from the line that enters its models through `add_fused_lm_head`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from . import qualify
from .deferred_metrics import (
    Ledger,
    codes_of,
    deferring,
    is_overridden,
    running_total,
    settle_where_stock_communicates,
    shown_to_others,
    stored,
)
from .fused_forward import Options, Request, Scored, install, is_fused, kind_of_calls, logger, router_loss, uninstall
from .replacements import Replacements, living

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    from .trl_dpo_memory import ReferenceMemory

NAME = "trl.DPOTrainer"

_HEAD_PARAMETERS = ["model", "temperature", "cast_lm_head_to_fp32", "outputs"]
_REFERENCE_PARAMETERS = ["self", "model", "inputs"]
_PRECOMPUTE_PARAMETERS = ["self", "dataset", "name", "batch_size"]
_LOSS_PARAMETERS = ["self", "model", "inputs", "return_outputs"]
_FLOS_PARAMETERS = ["self"]
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
_METRICS = "_metrics"
_TOKENS = "_total_train_tokens"
_OWN = "_fastdpo"

_replacements = Replacements()
_trainers: weakref.WeakSet[DPOTrainer] = weakref.WeakSet()


class _Own(NamedTuple):
    """What a trainer that was built patched has of ours."""

    ledger: Ledger
    memory: ReferenceMemory


def why_not() -> str | None:
    """What of the seam is not as this module knows it; None if all is."""
    from trl.trainer import dpo_trainer, utils

    for function, expected in (
        (getattr(dpo_trainer, "add_fused_lm_head", None), _HEAD_PARAMETERS),
        (getattr(dpo_trainer.DPOTrainer, "compute_ref_log_probs", None), _REFERENCE_PARAMETERS),
        (getattr(dpo_trainer.DPOTrainer, "_precompute_ref_logps", None), _PRECOMPUTE_PARAMETERS),
        (getattr(dpo_trainer.DPOTrainer, "_compute_loss", None), _LOSS_PARAMETERS),
        (getattr(dpo_trainer.DPOTrainer, "store_flos", None), _FLOS_PARAMETERS),
        (getattr(dpo_trainer.DPOTrainer, "evaluation_loop", None), _EVALUATION_PARAMETERS),
        (dpo_trainer.DPOTrainer.__init__, _INIT_PARAMETERS),
    ):
        found = None if function is None else list(inspect.signature(function).parameters)
        if found != expected:
            return f"a function with the parameters {expected} was expected in trl.trainer.dpo_trainer; found {found}"
    for kind, expected in (
        (utils.FusedCausalLMOutput, _OUTPUT_FIELDS),
        (dpo_trainer.DataCollatorForPreference, _COLLATOR_FIELDS),
    ):
        fields = {field.name for field in dataclasses.fields(kind)}
        if fields != expected:
            return f"{kind.__name__} must have the fields {sorted(expected)}; has {sorted(fields)}"
    return None


def enable(options: Options) -> None:
    from trl.trainer import dpo_trainer

    from .trl_dpo_memory import ReferenceMemory

    stock_add = getattr(dpo_trainer, "add_fused_lm_head")  # noqa: B009
    stock_reference = dpo_trainer.DPOTrainer.compute_ref_log_probs
    stock_precompute = dpo_trainer.DPOTrainer._precompute_ref_logps
    stock_init = dpo_trainer.DPOTrainer.__init__
    stock_loss = dpo_trainer.DPOTrainer._compute_loss
    codes = codes_of(stock_loss)

    @functools.wraps(stock_add)
    def add_fused_lm_head(model, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs",)):
        uninstall(model)  # else ours of another trainer would stay below
        stock_add(model, temperature, cast_lm_head_to_fp32, outputs)
        # The policy's statistics feed the metrics; of a reference only log-probabilities are asked for.
        role = "policy" if len(outputs) > 1 else "reference"
        statistics = tuple(name for name in outputs if name in _STATISTICS)
        transform = qualify.logit_transform(model.config.get_text_config())
        request = Request(statistics, temperature, cast_lm_head_to_fp32, *transform)
        install(model, NAME, role, request, options, functools.partial(_answer, model.config))

    @functools.wraps(stock_reference)
    def compute_ref_log_probs(self, model, inputs):
        with kind_of_calls("reference"):
            return stock_reference(self, model, inputs)

    @functools.wraps(stock_precompute)
    def _precompute_ref_logps(self, dataset, name, batch_size):
        from . import trl_dpo_precompute

        if not trl_dpo_precompute.is_ours(self, dataset):
            return stock_precompute(self, dataset, name, batch_size)
        return trl_dpo_precompute.precompute(self, dataset, name, batch_size)

    @functools.wraps(stock_loss)
    def _compute_loss(self, model, inputs, return_outputs):
        own: _Own | None = vars(self).get(_OWN)
        if own is None:  # built before
            return stock_loss(self, model, inputs, return_outputs)
        with own.memory.serving(self, inputs) as inputs:
            try:
                with deferring(self.accelerator, own.ledger, codes):
                    found = stock_loss(self, model, inputs, return_outputs)
            finally:
                for metrics in stored(self, _METRICS).values():
                    own.ledger.take(metrics)
        own.ledger.settle_if_due(seen=is_overridden(self, dpo_trainer.DPOTrainer, _COMPUTES_METRICS))
        return found

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        vars(self)[_OWN] = _Own(Ledger(), ReferenceMemory(options.reference_memory))
        _trainers.add(self)
        config = inspect.signature(stock_init).bind(self, *args, **kwargs).arguments.get("args")
        if config is None or not config.padding_free:
            stock_init(self, *args, **kwargs)
            return
        config.padding_free = False  # TRL would warn that it pads
        try:
            stock_init(self, *args, **kwargs)
        finally:
            config.padding_free = True
        self.padding_free = is_fused(self.model)
        if not self.padding_free:
            logger.warning("%s: padding_free=True, but batches are run padded, see above", NAME)

    _replacements.put(dpo_trainer, "add_fused_lm_head", add_fused_lm_head)
    _replacements.put(dpo_trainer.DPOTrainer, "__init__", __init__)
    _replacements.put(dpo_trainer.DPOTrainer, "_compute_loss", _compute_loss)
    settle_where_stock_communicates(_replacements, dpo_trainer.DPOTrainer, _ledger)
    _replacements.put(dpo_trainer.DPOTrainer, _METRICS, shown_to_others(_METRICS, _ledger, codes))
    _replacements.put(dpo_trainer.DPOTrainer, _TOKENS, running_total(_TOKENS, _ledger, codes))
    _replacements.put(dpo_trainer.DPOTrainer, "compute_ref_log_probs", compute_ref_log_probs)
    _replacements.put(dpo_trainer.DPOTrainer, "_precompute_ref_logps", _precompute_ref_logps)


def disable() -> None:
    _replacements.undo()
    for trainer in list(_trainers):
        own: _Own | None = vars(trainer).pop(_OWN, None)
        if own is not None:
            own.ledger.close(trainer)
    _trainers.clear()


def living_trainers() -> list[DPOTrainer]:
    """Trainers that exist already: their models were given their heads before any patch."""
    from trl.trainer.dpo_trainer import DPOTrainer

    return living(DPOTrainer)


def _ledger(trainer: Any) -> Ledger | None:
    own: _Own | None = vars(trainer).get(_OWN)
    return None if own is None else own.ledger


def _answer(config: PretrainedConfig, scored: Scored, kwargs: dict) -> object:
    from trl.trainer.utils import FusedCausalLMOutput

    logps = scored.logps
    count = kwargs.get("num_items_in_batch")
    if count is None:
        count = scored.label_mask.sum().clamp(min=1)
    loss, aux_loss = -logps.logps.sum() / count, None
    if scored.router_logits is not None:
        aux_loss = router_loss(config, scored)
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(
        loss=loss,
        log_probs=logps.logps,
        label_mask=scored.label_mask,
        aux_loss=aux_loss,
        **{name: getattr(logps, name) for name in _STATISTICS},
    )
