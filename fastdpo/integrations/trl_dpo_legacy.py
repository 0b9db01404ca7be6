"""TRL's DPOTrainer of the line before its rewrite, entered where it scores a batch, in `concatenated_forward`.

Training, evaluation, the reference and precomputing all go through there. What stock makes of logits is made here of
per-token results, in the same way, its oddities included: `ld_alpha` counts positions from the beginning of a row, and
`use_weighting` takes the log-probability of a token with the weight of the next.
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

from ..packing import IGNORE_INDEX
from . import qualify
from .deferred_metrics import (
    Ledger,
    codes_of,
    deferring,
    is_overridden,
    settle_where_stock_communicates,
    shown_to_others,
    stored,
)
from .fused_forward import (
    ENTERED,
    Latest,
    Options,
    Request,
    Scored,
    decline,
    install,
    is_fused,
    is_wrapped,
    kind_of_calls,
    logger,
    models_to_enter,
    router_loss,
    say_off,
)
from .reference_memory import Memory, digests_of_pairs, key_of
from .replacements import Replacements, living
from .trl_dpo_memory import log_probs, model_digest, precision_of, sharing
from .trl_dpo_memory import why_not as why_not_remember

if TYPE_CHECKING:
    DPOTrainer = Any  # of another TRL than types are checked with

NAME = "trl.DPOTrainer"

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
_METRICS = "_stored_metrics"
_OWN = "_fastdpo"

_replacements = Replacements()
_trainers: weakref.WeakSet[DPOTrainer] = weakref.WeakSet()


@dataclass(eq=False)
class _Own:
    """What a trainer that was built patched has of ours."""

    memory: Memory
    ledger: Ledger = field(default_factory=Ledger)
    returns_metrics: bool = False  # to whoever has called the function that is running
    batch: Latest[dict[str, Any] | str] = field(default_factory=Latest)


def why_not() -> str | None:
    """What of the seam is not as this module knows it; None if all is."""
    from trl.trainer import dpo_trainer

    for name, expected in _PARAMETERS.items():
        function = getattr(dpo_trainer.DPOTrainer, name, None)
        found = None if function is None else list(inspect.signature(function).parameters)
        if found != expected:
            return f"DPOTrainer.{name} must have the parameters {expected}; found {found}"
    for name in ("flush_left", "flush_right"):
        if not hasattr(dpo_trainer, name):
            return f"trl.trainer.dpo_trainer must have {name}"
    return None


def enable(options: Options) -> None:
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
        vars(self)[_OWN] = _Own(Memory(options.reference_memory, NAME))
        _trainers.add(self)
        config = inspect.signature(stock_init).bind(self, *args, **kwargs).arguments.get("args")
        flattens = config is not None and config.padding_free
        with _padded(config) if flattens else nullcontext():  # else TRL would warn of other attentions than its own
            stock_init(self, *args, **kwargs)
        _install_models(self, options)
        self.padding_free = flattens
        if flattens and not is_fused(self.model):
            logger.warning("%s: padding_free=True goes TRL's own way, see above", NAME)

    @functools.wraps(stock_create)
    def create_accelerator_and_postprocess(self):
        """The last step before the reference is prepared: what accelerate puts around its forward goes around ours."""
        stock_create(self)
        _install_models(self, options)

    @functools.wraps(stock_forward)
    def concatenated_forward(self, model, batch, is_ref_model=False):
        if _OWN not in vars(self) or not is_wrapped(model, NAME):  # built before
            return stock_forward(self, model, batch, is_ref_model)
        with kind_of_calls("reference") if is_ref_model else nullcontext():
            inputs = _inputs_once(self, batch)
            if isinstance(inputs, str):
                decline(model, NAME, inputs)
                return stock_forward(self, model, batch, is_ref_model)
            output = model(**inputs, fused_lm_head=True)
        if "log_probs" in output:
            return _results(self, inputs["input_ids"], inputs["labels"] != IGNORE_INDEX, output, is_ref_model)
        with _padded(self):  # logits: stock goes on from them
            return stock_forward(self, lambda *args, **kwargs: output, batch, is_ref_model)

    @functools.wraps(stock_metrics)
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        own: _Own | None = vars(self).get(_OWN)
        if own is None:  # built before
            return stock_metrics(self, model, batch, train_eval)
        batch = {**batch, **_remembered(self, own.memory, batch)}
        with deferring(self.accelerator, own.ledger, codes):
            loss, metrics = stock_metrics(self, model, batch, train_eval)
        seen = own.returns_metrics or is_overridden(self, DPOTrainer, _COMPUTES_METRICS)
        if seen or sys._getframe(1).f_code not in callers:
            return loss, own.ledger.known(metrics)
        own.ledger.settle_if_due(seen=False)
        return loss, own.ledger.keep(metrics, stored(self, _METRICS)[train_eval])

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
    settle_where_stock_communicates(_replacements, DPOTrainer, _ledger)
    _replacements.put(DPOTrainer, _METRICS, shown_to_others(_METRICS, _ledger, codes_of(DPOTrainer.store_metrics)))


def disable() -> None:
    _replacements.undo()
    for trainer in list(_trainers):
        own: _Own | None = vars(trainer).pop(_OWN, None)
        if own is not None:
            own.ledger.close(trainer)
        vars(trainer).pop(ENTERED, None)
    _trainers.clear()


def living_trainers() -> list[DPOTrainer]:
    """Trainers that exist already: their reference has been prepared without any patch."""
    from trl.trainer.dpo_trainer import DPOTrainer

    return living(DPOTrainer)


def _ledger(trainer: Any) -> Ledger | None:
    own: _Own | None = vars(trainer).get(_OWN)
    return None if own is None else own.ledger


@contextmanager
def _returning_metrics(trainer: DPOTrainer, value: bool) -> Iterator[None]:
    """While a function runs that returns its metrics, or does not."""
    own: _Own | None = vars(trainer).get(_OWN)
    if own is None:  # built before
        yield
        return
    before, own.returns_metrics = own.returns_metrics, value
    try:
        yield
    finally:
        own.returns_metrics = before


@contextmanager
def _padded(owner: Any) -> Iterator[None]:
    """Without `padding_free`, of a trainer or its configuration."""
    before, owner.padding_free = owner.padding_free, False
    try:
        yield
    finally:
        owner.padding_free = before


def _install_models(trainer: DPOTrainer, options: Options) -> None:
    liger = [name for name in ("use_liger_loss", "use_liger_kernel") if getattr(trainer.args, name, False)]
    for role, base in models_to_enter(trainer):
        if liger:
            say_off(f"{NAME} ({role}): not fused, {liger[0]} is set")
            continue
        statistics = ("mean_logits", *(("log_sum_sq_probs",) if trainer.use_weighting else ()))
        wanted = statistics if role == "policy" else ()  # of a reference only log-probabilities are
        request = Request(wanted, 1.0, False, *qualify.logit_transform(base.config.get_text_config()))
        install(base, NAME, role, request, options, functools.partial(_answer, base.config), stock_scores=False)


def _answer(config: Any, scored: Scored, kwargs: dict) -> dict[str, Tensor]:
    """`log_probs` and statistics [2B, L-1], of the token after each position; `aux_loss` of a router."""
    found = {"log_probs": scored.logps.logps}
    found |= {name: x for name, x in scored.logps._asdict().items() if name != "logps" and x is not None}
    if scored.router_logits is not None:
        found["aux_loss"] = router_loss(config, scored)
    return found


def _inputs_once(trainer: DPOTrainer, batch: dict[str, Any]) -> dict[str, Any] | str:
    """`_inputs`, the same tensors for policy and reference."""
    own: _Own = vars(trainer)[_OWN]
    tensors = tuple(x for x in batch.values() if isinstance(x, Tensor))
    return own.batch.get(tensors, lambda: _inputs(trainer, batch))


def _inputs(trainer: DPOTrainer, batch: dict[str, Any]) -> dict[str, Any] | str:
    """Ids, mask and labels [2B, L], flushed and cut as stock does it; or why it can't be fused."""
    from trl.trainer import dpo_trainer

    flush_left, flush_right = (getattr(dpo_trainer, name) for name in ("flush_left", "flush_right"))
    if trainer.is_encoder_decoder:
        return "the model is an encoder-decoder"
    other = [name for name in _OTHER_INPUTS if batch.get(name) is not None]
    if other:
        return f"batches hold {', '.join(other)} too"
    whole = trainer.concatenated_inputs(batch, padding_value=trainer.pad_token_id)
    ids, mask = (
        torch.cat([whole[f"prompt_{name}"], whole[f"completion_{name}"]], dim=1)
        for name in ("input_ids", "attention_mask")
    )
    scored = torch.cat([torch.zeros_like(whole["prompt_attention_mask"]), whole["completion_attention_mask"]], dim=1)

    longest = mask.shape[1] if trainer.max_length is None else trainer.max_length
    cut = longest < mask.shape[1]
    if cut and trainer.truncation_mode == "keep_end":
        mask, ids, scored = (x[:, -longest:] for x in flush_right(mask, ids, scored))
    mask, ids, scored = flush_left(mask, ids, scored)
    if cut:
        mask, ids, scored = (x[:, :longest] for x in (mask, ids, scored))
        if scored[:, 0].any():  # stock counts a token there that nothing predicts
            return "a prompt was cut away whole"
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(scored == 0, IGNORE_INDEX),
        "use_cache": False,
        **({"output_router_logits": True} if trainer.aux_loss_enabled else {}),
    }


def _remembered(trainer: DPOTrainer, memory: Memory, batch: dict[str, Any]) -> dict[str, Tensor]:
    """The reference's log-probabilities [B] by their names in a batch; nothing where the memory is off."""
    if not memory.on or "ref_chosen_logps" in batch:  # precomputed
        return {}
    if not memory.begun:
        _begin(trainer, memory)
    inputs = _inputs_once(trainer, batch) if memory.on else "it is off"
    if isinstance(inputs, str):  # what can't be fused is said where it isn't
        return {}
    digests = digests_of_pairs(inputs["input_ids"], inputs["attention_mask"], inputs["labels"] != IGNORE_INDEX)

    def compute(missing: list[int]) -> Tensor:
        all_are = len(missing) == len(digests)  # the same tensors are packed once
        part = batch if all_are else {name: x[missing] for name, x in batch.items() if isinstance(x, Tensor)}
        return torch.stack(list(trainer.compute_ref_log_probs(part)), 1)

    found = log_probs(memory, trainer, _as_reference, digests, compute)
    chosen, rejected = found.to(inputs["input_ids"].device, torch.float32).unbind(1)
    return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def _begin(trainer: DPOTrainer, memory: Memory) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    def key() -> str:
        normalized = "ipo" in trainer.loss_type
        return key_of("legacy", model_digest(trainer, _as_reference), precision_of(trainer), normalized)

    trainer.add_callback(sharing(memory))  # on every rank, since all must take part
    reason = "the model is an encoder-decoder" if trainer.is_encoder_decoder else None
    memory.begin(reason or why_not_remember(trainer, DPOTrainer, _as_reference), key)


def _as_reference(trainer: Any) -> AbstractContextManager:
    return nullcontext() if trainer.ref_model is not None else trainer.null_ref_context()


def _results(
    trainer: DPOTrainer, ids: Tensor, scored: Tensor, output: dict[str, Tensor], is_ref_model: bool
) -> dict[str, Tensor]:
    """What stock returns. `ids` and `scored` are [2B, L], scored tokens are never the first of a row."""
    n = len(ids) // 2
    start = int(scored.any(0).int().argmax()) - 1 if trainer.use_logits_to_keep else 0  # of stock's logits
    logps = F.pad(output["log_probs"], (1, 0))[:, start:]  # of each token
    predicts = scored[:, 1:].to(logps.device)  # where the next token is scored
    scored = scored[:, start:].to(logps.device)
    counts = scored.sum(1)
    sums = logps.sum(1)
    found = {}

    if "log_sum_sq_probs" in output:  # arXiv 2406.11827, eq. 2
        with torch.no_grad():
            weights = ((F.pad(output["log_probs"], (1, -1)) - output["log_sum_sq_probs"]) * predicts).sum(1) / counts
            found["policy_weights"] = (weights[:n] + weights[n:]).exp().clamp(max=1)
    if trainer.args.rpo_alpha is not None or "sft" in trainer.loss_type:
        kept = scored[:n] & (ids[:n, start:] != 0).to(logps.device)  # stock ignores the token 0
        found["nll_loss"] = -(logps[:n] * kept).sum() / kept.sum()
    if "ipo" in trainer.loss_type:
        sums = sums / counts
    if trainer.args.ld_alpha is not None and not is_ref_model:
        shorter = torch.minimum(counts[:n], counts[n:]).repeat(2)
        position = torch.arange(logps.shape[1], device=logps.device)
        front, rear = (position < shorter[:, None]), (position < counts[:, None])
        sums = (logps * (front + trainer.args.ld_alpha * (rear & ~front))).sum(1)

    found |= {"chosen_logps": sums[:n], "rejected_logps": sums[n:]}
    if "mean_logits" in output:
        for name, rows in (("chosen", slice(0, n)), ("rejected", slice(n, None))):
            found[f"mean_{name}_logits"] = (output["mean_logits"][rows] * predicts[rows]).sum() / predicts[rows].sum()
    if trainer.aux_loss_enabled:
        found["aux_loss"] = output["aux_loss"]
    return found
