"""TRL's DPOTrainer before its rewrite, patched where it scores a batch, in `concatenated_forward`.

Training, evaluation, the reference and precomputing all call it. What TRL computes from logits is
computed here from per-token results in the same way, including its peculiarities: `ld_alpha` counts
positions from the beginning of a row, and `use_weighting` multiplies a token's log-probability by
the next token's weight.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models import fallback, forward
from ...models.fallback import counting_calls_as, logger
from ...models.forward import Request, ScoredBatch
from ...models.router import router_loss
from ...packing import IGNORE_INDEX
from ..bypass import first_log_callback, left_unpatched, report_skipped_init
from ..deferred_metrics import (
    Ledger,
    codes_of,
    deferring,
    is_overridden,
    settle_where_trl_communicates,
    shown_metrics,
    stored,
)
from ..last_result import LastResult
from ..protocol import STATE, PatchOptions
from ..reference_memory import Memory, digests_of_pairs, key_of
from ..replacements import Replacements
from ..signatures import signature_difference
from .ledgers import discard_states, ledger_of
from .memory import exchange_callback, memory_unsupported_reason, remembered_logps
from .models import new_models
from .names import DPO
from .padding_free import without_padding_free
from .reference import precision_of, reference_digest

if TYPE_CHECKING:
    DPOTrainer = Any  # types are checked in an environment with another TRL

_PARAMETERS = {
    "concatenated_forward": ["self", "model", "batch", "is_ref_model"],
    "concatenated_inputs": ["batch", "padding_value"],
    "get_batch_loss_metrics": ["self", "model", "batch", "train_eval"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
    "store_metrics": ["self", "metrics", "train_eval"],
    "create_accelerator_and_postprocess": ["self"],
    "store_flos": ["self"],
    "evaluation_loop": [
        *("self", "dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix")
    ],
}
_COMPUTES_METRICS = (
    *("get_batch_loss_metrics", "compute_loss", "training_step", "prediction_step", "store_metrics"),
    *("store_flos", "evaluation_loop", "_stored_metrics"),
)
_OTHER_INPUTS = ("pixel_values", "pixel_attention_mask", "image_sizes", "token_type_ids")
_PATH = ("get_batch_loss_metrics", "concatenated_forward")
_METRICS = "_stored_metrics"

_replacements = Replacements()
_trainers: weakref.WeakSet[DPOTrainer] = weakref.WeakSet()


@dataclass(eq=False)
class _LegacyDPOState:
    """The state of a trainer that was created after `patch()`."""

    memory: Memory
    ledger: Ledger = field(default_factory=Ledger)
    models: weakref.WeakSet = field(default_factory=weakref.WeakSet)
    returns_metrics: bool = False  # whether the function that is running returns its metrics to its caller
    batch: LastResult[dict[str, Any] | str] = field(default_factory=LastResult)


def unsupported_reason() -> str | None:
    """Returns how TRL differs from the versions that this module was tested with, or None."""
    from trl.trainer import dpo_trainer

    for name, expected in _PARAMETERS.items():
        difference = signature_difference(dpo_trainer.DPOTrainer, name, expected)
        if difference is not None:
            return difference
    for name in ("flush_left", "flush_right"):
        if not hasattr(dpo_trainer, name):
            return f"trl.trainer.dpo_trainer must have {name}"
    return None


def trainer_class() -> type[DPOTrainer]:
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def enable(options: PatchOptions) -> None:
    from trl.trainer import dpo_trainer

    DPOTrainer: Any = dpo_trainer.DPOTrainer
    stock_init = DPOTrainer.__init__
    stock_create = DPOTrainer.create_accelerator_and_postprocess
    stock_forward = DPOTrainer.concatenated_forward
    stock_metrics = DPOTrainer.get_batch_loss_metrics
    stock_loss = DPOTrainer.compute_loss
    stock_prediction = DPOTrainer.prediction_step
    codes, callers = codes_of(stock_metrics), codes_of(stock_loss) | codes_of(stock_prediction)

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        _trainers.add(self)
        if left_unpatched(self, DPO, DPOTrainer, _PATH):
            stock_init(self, *args, **kwargs)
            return
        vars(self)[STATE] = _LegacyDPOState(Memory(options.reference_memory, DPO))
        config = inspect.signature(stock_init).bind(self, *args, **kwargs).arguments.get("args")
        flattens = config is not None and config.padding_free
        with without_padding_free(config) if flattens else nullcontext():  # TRL warns of other attention
            stock_init(self, *args, **kwargs)
        _install(self, options)
        self.padding_free = flattens
        if flattens and not forward.is_fused(self.model):
            logger.warning("%s: padding_free=True falls back to TRL for the reason logged above", DPO)
        if not _liger_option(self):  # whose reason is logged
            self.add_callback(first_log_callback(self, DPO))

    @functools.wraps(stock_create)
    def create_accelerator_and_postprocess(self):
        """The last step before the reference is prepared: accelerate then
        wraps our forward, not the reverse.
        """
        _trainers.add(self)
        report_skipped_init(self, DPO, DPOTrainer, _PATH)
        stock_create(self)
        _install(self, options)

    @functools.wraps(stock_forward)
    def concatenated_forward(self, model, batch, is_ref_model=False):
        if vars(self).get(STATE) is None or not forward.is_installed(model, DPO):  # created before patch()
            return stock_forward(self, model, batch, is_ref_model)
        with counting_calls_as("reference") if is_ref_model else nullcontext():
            inputs = _cached_inputs(self, batch)
            if isinstance(inputs, str):
                forward.record_fallback(model, DPO, inputs)
                return stock_forward(self, model, batch, is_ref_model)
            output = model(**inputs, fused_lm_head=True)
        if "log_probs" in output:
            return _results(self, inputs["input_ids"], inputs["labels"] != IGNORE_INDEX, output, is_ref_model)
        with without_padding_free(self):  # logits, from which TRL computes log-probabilities
            return stock_forward(self, lambda *args, **kwargs: output, batch, is_ref_model)

    @functools.wraps(stock_metrics)
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        state: _LegacyDPOState | None = vars(self).get(STATE)
        if state is None:  # created before patch()
            return stock_metrics(self, model, batch, train_eval)
        batch = {**batch, **_remembered(self, state.memory, batch)}
        with deferring(self.accelerator, state.ledger, codes):
            loss, metrics = stock_metrics(self, model, batch, train_eval)
        read = state.returns_metrics or is_overridden(self, DPOTrainer, _COMPUTES_METRICS)
        if read or sys._getframe(1).f_code not in callers:
            return loss, state.ledger.settled(metrics)
        state.ledger.settle_if_due(read=False)
        return loss, state.ledger.keep(metrics, stored(self, _METRICS)[train_eval])

    @functools.wraps(stock_loss)
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with _returning_metrics(self, return_outputs):
            return stock_loss(self, model, inputs, return_outputs, num_items_in_batch)

    @functools.wraps(stock_prediction)
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with _returning_metrics(self, not prediction_loss_only):
            return stock_prediction(self, model, inputs, prediction_loss_only, ignore_keys)

    _replacements.put(DPOTrainer, "__init__", __init__)
    _replacements.put(DPOTrainer, "create_accelerator_and_postprocess", create_accelerator_and_postprocess)
    _replacements.put(DPOTrainer, "concatenated_forward", concatenated_forward)
    _replacements.put(DPOTrainer, "get_batch_loss_metrics", get_batch_loss_metrics)
    _replacements.put(DPOTrainer, "compute_loss", compute_loss)
    _replacements.put(DPOTrainer, "prediction_step", prediction_step)
    settle_where_trl_communicates(_replacements, DPOTrainer, ledger_of)
    _replacements.put(DPOTrainer, _METRICS, shown_metrics(_METRICS, ledger_of, codes_of(DPOTrainer.store_metrics)))


def disable() -> None:
    _replacements.undo()
    discard_states(_trainers)


@contextmanager
def _returning_metrics(trainer: DPOTrainer, value: bool) -> Iterator[None]:
    """Records during the block whether the function that is running
    returns its metrics to its caller.
    """
    state: _LegacyDPOState | None = vars(trainer).get(STATE)
    if state is None:  # created before patch()
        yield
        return
    before, state.returns_metrics = state.returns_metrics, value
    try:
        yield
    finally:
        state.returns_metrics = before


def _install(trainer: DPOTrainer, options: PatchOptions) -> None:
    state: _LegacyDPOState | None = vars(trainer).get(STATE)
    if state is None:
        return
    liger = _liger_option(trainer)
    for role, model in new_models(trainer, state.models):
        if liger is not None:
            fallback.report(f"{DPO} ({role}): not fused, {liger} is set")
            continue
        statistics = ("mean_logits", *(("log_sum_sq_probs",) if trainer.use_weighting else ()))
        request = Request(
            DPO,
            role,
            outputs=statistics if role == "policy" else (),  # only the policy's statistics feed metrics
            share_prompts=options.share_prompts,
            memory_budget=options.memory_budget,
        )
        forward.install(model, request, functools.partial(_make_output, model.config), prior_scores=False)


def _liger_option(trainer: DPOTrainer) -> str | None:
    """The option of a trainer by which Liger replaces the head or the loss."""
    options = ("use_liger_loss", "use_liger_kernel")
    return next((name for name in options if getattr(trainer.args, name, False)), None)


def _make_output(config: Any, scored: ScoredBatch, kwargs: dict) -> dict[str, Tensor]:
    """`log_probs` and statistics [2B, L-1] of the token after each
    position, and `aux_loss` of a router.
    """
    output = {"log_probs": scored.logps.logps}
    output |= {name: x for name, x in scored.logps._asdict().items() if name != "logps" and x is not None}
    if scored.router_logits is not None:
        output["aux_loss"] = router_loss(config, scored.router_logits, scored.multiplicity)
    return output


def _cached_inputs(trainer: DPOTrainer, batch: dict[str, Any]) -> dict[str, Any] | str:
    """`_inputs`, with the same tensors for policy and reference."""
    state: _LegacyDPOState = vars(trainer)[STATE]
    tensors = tuple(x for x in batch.values() if isinstance(x, Tensor))
    return state.batch.get(tensors, lambda: _inputs(trainer, batch))


def _inputs(trainer: DPOTrainer, batch: dict[str, Any]) -> dict[str, Any] | str:
    """Ids, mask and labels [2B, L], aligned and truncated as in TRL; or the
    reason why the batch is unsupported.
    """
    from trl.trainer import dpo_trainer

    flush_left, flush_right = (getattr(dpo_trainer, name) for name in ("flush_left", "flush_right"))
    if trainer.is_encoder_decoder:
        return "the model is an encoder-decoder"
    other = [name for name in _OTHER_INPUTS if batch.get(name) is not None]
    if other:
        return f"batches also hold {', '.join(other)}"
    whole = trainer.concatenated_inputs(batch, padding_value=trainer.pad_token_id)
    ids, mask = (
        torch.cat([whole[f"prompt_{name}"], whole[f"completion_{name}"]], dim=1)
        for name in ("input_ids", "attention_mask")
    )
    scored = torch.cat([torch.zeros_like(whole["prompt_attention_mask"]), whole["completion_attention_mask"]], dim=1)

    longest = mask.shape[1] if trainer.max_length is None else trainer.max_length
    truncated = longest < mask.shape[1]
    if truncated and trainer.truncation_mode == "keep_end":
        mask, ids, scored = (x[:, -longest:] for x in flush_right(mask, ids, scored))
    mask, ids, scored = flush_left(mask, ids, scored)
    if truncated:
        mask, ids, scored = (x[:, :longest] for x in (mask, ids, scored))
        if scored[:, 0].any():  # TRL counts a token there that nothing predicts
            return "truncation has left nothing of a prompt"
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(scored == 0, IGNORE_INDEX),
        "use_cache": False,
        **({"output_router_logits": True} if trainer.aux_loss_enabled else {}),
    }


def _remembered(trainer: DPOTrainer, memory: Memory, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The reference's log-probabilities [B] by their names in a batch;
    nothing if the memory is disabled.
    """
    if not memory.enabled or "ref_chosen_logps" in batch:  # precomputed
        return {}
    if not memory.started:
        _start(trainer, memory)
    if not memory.enabled:
        return {}
    inputs = _cached_inputs(trainer, batch)
    if isinstance(inputs, str):  # the reason is logged when the model is called
        return {}
    digests = digests_of_pairs(inputs["input_ids"], inputs["attention_mask"], inputs["labels"] != IGNORE_INDEX)

    def compute(missing: list[int]) -> Tensor:
        all_missing = len(missing) == len(digests)  # the layout of the same tensors is cached
        part = batch if all_missing else {name: x[missing] for name, x in batch.items() if isinstance(x, Tensor)}
        return torch.stack(list(trainer.compute_ref_log_probs(part)), 1)

    logps = remembered_logps(memory, trainer, _as_reference, digests, compute)
    chosen, rejected = logps.to(inputs["input_ids"].device, torch.float32).unbind(1)
    return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def _start(trainer: DPOTrainer, memory: Memory) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    def key() -> str:
        normalized = "ipo" in trainer.loss_type
        return key_of("legacy", reference_digest(trainer, _as_reference), precision_of(trainer), normalized)

    trainer.add_callback(exchange_callback(memory))  # on every rank, since all must take part
    reason = "the model is an encoder-decoder" if trainer.is_encoder_decoder else None
    memory.start(reason or memory_unsupported_reason(trainer, DPOTrainer, _as_reference), key)


def _as_reference(trainer: Any) -> AbstractContextManager:
    return nullcontext() if trainer.ref_model is not None else trainer.null_ref_context()


def _results(
    trainer: DPOTrainer, ids: Tensor, scored: Tensor, output: dict[str, Tensor], is_ref_model: bool
) -> dict[str, Tensor]:
    """The return value of TRL. `ids` and `scored` are [2B, L]; the first token of a row is never scored."""
    n = len(ids) // 2
    start = int(scored.any(0).int().argmax()) - 1 if trainer.use_logits_to_keep else 0  # of TRL's logits
    logps = F.pad(output["log_probs"], (1, 0))[:, start:]  # of each token
    predicts = scored[:, 1:].to(logps.device)  # where the next token is scored
    scored = scored[:, start:].to(logps.device)
    counts = scored.sum(1)
    sums = logps.sum(1)
    results = {}

    if "log_sum_sq_probs" in output:  # arXiv 2406.11827, eq. 2
        with torch.no_grad():
            weights = ((F.pad(output["log_probs"], (1, -1)) - output["log_sum_sq_probs"]) * predicts).sum(1) / counts
            results["policy_weights"] = (weights[:n] + weights[n:]).exp().clamp(max=1)
    if trainer.args.rpo_alpha is not None or "sft" in trainer.loss_type:
        kept = scored[:n] & (ids[:n, start:] != 0).to(logps.device)  # TRL ignores token 0
        results["nll_loss"] = -(logps[:n] * kept).sum() / kept.sum()
    if "ipo" in trainer.loss_type:
        sums = sums / counts
    if trainer.args.ld_alpha is not None and not is_ref_model:
        shorter = torch.minimum(counts[:n], counts[n:]).repeat(2)
        position = torch.arange(logps.shape[1], device=logps.device)
        shared, own = (position < shorter[:, None]), (position < counts[:, None])
        sums = (logps * (shared + trainer.args.ld_alpha * (own & ~shared))).sum(1)

    results |= {"chosen_logps": sums[:n], "rejected_logps": sums[n:]}
    if "mean_logits" in output:
        for name, rows in (("chosen", slice(0, n)), ("rejected", slice(n, None))):
            results[f"mean_{name}_logits"] = (output["mean_logits"][rows] * predicts[rows]).sum() / predicts[rows].sum()
    if trainer.aux_loss_enabled:
        results["aux_loss"] = output["aux_loss"]
    return results
