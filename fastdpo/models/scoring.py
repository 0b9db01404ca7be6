"""Scores the batch of a call: runs the backbone on packed or padded tokens, and the head on what is scored."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import packing
from ..ops.head.results import TokenLogps
from . import attention, head
from .batch import SCORING_ARGUMENTS, Call
from .state import FusedForward, RunnableBatch, ScoredBatch, Verdict, states

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def score(model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, call: Call) -> ScoredBatch:
    """Runs the backbone on the batch and the head on its scored positions, in the autocast that the prior forward runs
    in, and restores the padded shape. Without memory, it does so again: first without kept activations, then without
    what recordings held.
    """
    with fused.autocast or nullcontext():
        while True:
            try:
                return _score(model, fused, batch, call)
            except torch.OutOfMemoryError:  # the call is repeated out of the handler, whose error holds memory
                if not ((fused.kept and fused.kept.release()) or release_recordings(fused)):
                    raise


def release_recordings(fused: FusedForward) -> bool:
    """Gives back the memory of all models' recordings, which may be on one device. Returns whether there were any."""
    runners = {id(x.runner): x.runner for x in (fused, *(x for _, x in states()))}
    released = [runner.release() for runner in runners.values()]  # all of them, where `any` alone would stop
    return any(released)


def _score(model: PreTrainedModel, fused: FusedForward, batch: RunnableBatch, call: Call) -> ScoredBatch:
    options, layout, part = fused.options, batch.layout, batch.part
    verdict = cast(Verdict, fused.verdict)
    with fused.kept.keeping(model, fused, batch) if fused.kept else nullcontext():
        hidden, router_logits = attention.run(batch.configs, _states, fused, verdict, batch)
    if options.rewards:
        scores = options.rewards.scores(model, hidden)
        logps = TokenLogps(scores[layout.output_source][:, None])  # each row has one
    else:
        scored = _scored(fused, verdict.head, batch, hidden)
        results = (scored if part is None else part.results(scored))._asdict()
        logps = TokenLogps(**{name: layout.unpack(x) for name, x in results.items() if x is not None})
    label_mask = call.batch.targets.to(logps.logps.device) != packing.IGNORE_INDEX
    return ScoredBatch(logps, label_mask, router_logits, layout.multiplicity[None])


def _states(fused: FusedForward, verdict: Verdict, batch: RunnableBatch) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """The states [N, D] of scored positions and, if they are asked for, the router logits of each layer."""
    index, part = batch.layout.score_index, batch.part
    if batch.is_run and (hidden := fused.runner.states(verdict, batch.inputs, index)) is not None:
        return hidden, None
    routing = {"output_router_logits": True} if batch.routes else {}
    run = partial(verdict.backbone, *batch.args, **batch.inputs, **routing)
    output = fused.kept.run(run) if fused.kept else run()
    states = output.last_hidden_state.flatten(0, 1)
    hidden = states.index_select(0, index) if part is None else part.scored_states(states)
    return hidden, output.router_logits if batch.routes else None


def _scored(fused: FusedForward, lm_head: nn.Linear, batch: RunnableBatch, hidden: Tensor) -> TokenLogps:
    """What the LM head computes of the positions that this rank scores, [N] each."""
    options, targets = fused.options, (batch.part or batch.layout).targets
    hidden = hidden.to(head.device_of(lm_head))
    autocast = nullcontext()
    if options.float32_head:
        hidden, autocast = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
    softcap, logit_scale = fused.logit_transform or cast(Verdict, fused.verdict).logit_transform
    with autocast, head.bare(lm_head) if batch.bare_head else nullcontext():
        return lm_head(
            hidden,
            fastdpo_targets=targets.to(hidden.device),
            softcap=softcap,
            logit_scale=logit_scale,
            temperature=options.temperature,
            outputs=options.outputs,
        )


def prior_output(fused: FusedForward, call: Call) -> Any:
    """The output of the prior forward for a call that scores: one that scores as well, or one with logits."""
    if fused.prior_scores:
        return fused.prior_forward(*call.args, fused_lm_head=True, **call.kwargs)
    return fused.prior_forward(*call.args, **{k: x for k, x in call.kwargs.items() if k not in SCORING_ARGUMENTS})


def router_loss(config: PretrainedConfig, scored: ScoredBatch) -> Tensor | None:
    """The load-balancing loss over the real tokens of a batch (Switch Transformers, Fedus et al.
    2021, eqs. 4 to 6), for a model with this configuration. None if the call did not ask for it.
    """
    if scored.router_logits is None:
        return None
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts = getattr(config, "num_experts", None) or config.num_local_experts  # Mixtral's name in transformers 4
    # The function weighs tokens by its mask, so a shared token counts as often as it occurs.
    loss = load_balancing_loss_func(
        cast(tuple[Tensor], scored.router_logits), experts, config.num_experts_per_tok, scored.multiplicity
    )
    return cast(Tensor, loss)
