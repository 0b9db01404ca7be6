"""Scores the batch of a call, and compares the first ones with the forward that the model had before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import packing
from ..logs import report
from ..ops import definitions
from ..ops.head.results import TokenLogps
from ..reasons import Reason
from . import calls, head, towers, verification
from .parts import backbone
from .router import returns_router_logits
from .sharding import is_sharded
from .state import FusedForward, RunnableBatch, ScoredBatch, install_head, restore, switch_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORING_ARGUMENTS = {"labels", "shift_labels", "num_items_in_batch"}
"""Arguments that a model's own forward does not receive when only its logits are needed."""


def score(model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, kwargs: dict) -> ScoredBatch:
    """Runs the backbone on the batch and the head on its scored
    positions, and restores the padded shape.
    """
    options, layout = fused.options, batch.layout
    routed = returns_router_logits(model, kwargs)
    routing = {"output_router_logits": True} if routed else {}
    with towers.sharing(model, batch.images):
        output = backbone(model)(*batch.args, **batch.inputs, **routing)
    hidden = output.last_hidden_state.flatten(0, 1).index_select(0, layout.score_index)  # [N, D]
    if options.rewards:
        scores = options.rewards.scores(model, hidden)
        logps = TokenLogps(scores[layout.output_source][:, None])  # each row has one
    else:
        logps = _logps(model, fused, batch, hidden)
    label_mask = _shifted_labels(kwargs).to(logps.logps.device) != packing.IGNORE_INDEX
    return ScoredBatch(logps, label_mask, output.router_logits if routed else None, layout.multiplicity[None])


def _logps(model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, hidden: Tensor) -> TokenLogps:
    """What the LM head computes of the scored positions, in the padded shape [R, W]."""
    options, lm_head = fused.options, head.head_of(model)
    hidden = hidden.to(head.device_of(lm_head))
    autocast = nullcontext()
    if options.float32_head:
        hidden, autocast = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
    softcap, logit_scale = fused.logit_transform
    with autocast, head.bare(lm_head) if batch.bare_head else nullcontext():
        scored = lm_head(
            hidden,
            fastdpo_targets=batch.layout.targets.to(hidden.device),
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=options.temperature,
            outputs=options.outputs,
            memory_budget=options.memory_budget,
        )
    results = {name: batch.layout.unpack(x) for name, x in scored._asdict().items() if x is not None}
    return TokenLogps(**results)


def _shifted_labels(kwargs: dict) -> Tensor:
    """The target of each position, [R, W]."""
    return kwargs["labels"][:, 1:] if kwargs.get("shift_labels") is None else kwargs["shift_labels"]


def verify(
    model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, args: tuple, kwargs: dict
) -> Reason | None:
    """Compares a call that is about to run with the same call of the prior forward.

    Returns why all calls go to the prior forward from now on. Only a trial has such a reason.

    Raises:
        VerificationError: they differ, and this is no trial.
    """
    options = fused.options
    name, is_trial = f"{options.integration} ({options.role})", not options.verify
    functions = ", ".join(options.changed)
    fused.verified.add(torch.is_grad_enabled())

    @contextmanager
    def as_before() -> Iterator[None]:
        restore(model, fused)
        try:
            yield
        finally:
            switch_attention(model, fused)
            install_head(model, fused)

    obstacle, is_scored = None, _shifted_labels(kwargs) != packing.IGNORE_INDEX
    if is_sharded(model):
        fused.verified.update((True, False))
        obstacle = Reason("verified-ranks")
    else:
        try:
            verification.verify(
                model,
                name,
                is_scored.any(1, keepdim=True) if options.rewards else is_scored,
                stock=lambda: _prior_results(fused, args, kwargs),
                fused=lambda: _fused_results(model, fused, batch, kwargs),
                as_before=as_before,
                is_random=fused.probe_result is not None and fused.probe_result.is_random,
                scores=options.rewards.scored if options.rewards else "log-probabilities",
            )
            calls.outcomes[fused.options.integration, "verified"] += 1
        except verification.NotComparable:
            obstacle = Reason("verified-checkpoints")
        except verification.VerificationError as error:
            if not is_trial:
                raise
            finding = f"its first call differs from stock in {error.differences}"
            return Reason("changed-calls", functions=functions, finding=finding)
    if obstacle is not None and options.changed:
        finding = f"its calls cannot be compared with stock ones: {obstacle}"
        return Reason("changed-calls", functions=functions, finding=finding)
    if obstacle is not None:
        report(f"{name}: not verified, {obstacle.named}")
    return None


def _fused_results(
    model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, kwargs: dict
) -> tuple[TokenLogps, dict[str, Tensor]]:
    scored = score(model, fused, batch, kwargs)
    return scored.logps, _other_results(fused, fused.make_output(scored, kwargs)) if fused.prior_scores else {}


def _other_results(fused: FusedForward, output: Any) -> dict[str, Tensor]:
    """What a model that scores returns next to the results of tokens, such as its loss, if its code has changed.

    A result that is new is among them.
    """
    own = ("log_probs", *fused.options.outputs)
    return {name: x for name, x in output.items() if name not in own} if fused.options.changed else {}


def _prior_results(fused: FusedForward, args: tuple, kwargs: dict) -> tuple[TokenLogps, dict[str, Tensor]]:
    """What the prior forward computes of a batch, [R, W]."""
    statistics = fused.options.outputs
    if fused.prior_scores:
        output = fused.prior_forward(*args, fused_lm_head=True, **kwargs)
        logps = TokenLogps(output.log_probs, **{name: getattr(output, name) for name in statistics})
        return logps, _other_results(fused, output)
    output = prior_logits(fused, args, kwargs)
    if fused.options.rewards:
        return TokenLogps(fused.options.rewards.returned(output, _shifted_labels(kwargs) != packing.IGNORE_INDEX)), {}
    logits = output.logits
    targets = _shifted_labels(kwargs).to(logits.device)
    logits = logits[:, :-1] if kwargs.get("shift_labels") is None else logits
    temperature = fused.options.temperature
    return definitions.token_logps(logits, targets, temperature=temperature, outputs=("logps", *statistics)), {}


def prior_logits(fused: FusedForward, args: tuple, kwargs: dict) -> Any:
    return fused.prior_forward(*args, **{name: x for name, x in kwargs.items() if name not in SCORING_ARGUMENTS})
