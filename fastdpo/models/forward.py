"""The fused forward of a causal LM, through which all integrations score their batches.

`model(input_ids=..., attention_mask=..., labels=..., fused_lm_head=True)` packs the padded batch,
runs the model's own backbone on the packed tokens, scores the labelled positions with the fused
head, and returns per-token results in the padded shape. All other calls, and batches that are not
supported, go to the forward that the model had before.

All of this happens inside `model(...)`, so that the hooks of DDP, FSDP2, ZeRO-3, PEFT and autocast
see an ordinary call. A call with a `Reason` as `fused_lm_head` falls back for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..reasons import Reason
from . import deciding, parts, pickling
from .batch import SCORING_ARGUMENTS, Call
from .calls import calls
from .examine import support
from .identity.functions import autocast_of, inner_function
from .identity.structure import Structure
from .installing import restore
from .parts import find_base, input_device_of, text_config
from .ranks import splitting
from .ranks.sharding import is_sharded
from .running import Runner
from .scoring import prior_output, score
from .state import ATTRIBUTE, MODELS, ForwardOptions, FusedForward, MakeOutput, Verdict, state_of, states

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def install(
    model: PreTrainedModel, options: ForwardOptions, make_output: MakeOutput, *, prior_scores: bool = True
) -> None:
    """Replaces the forward of a model. If the model is not supported, logs why, and only counts its
    calls.

    Args:
        model: the causal LM itself, without wrappers of PEFT or engines.
        options: what the fused forward computes.
        make_output: makes the output of fused calls.
        prior_scores: whether the model's present forward takes `fused_lm_head` and labels. If not,
            it is the model's own: calls that are not fused return its logits, and the fused head is
            compared with them first.
    """
    uninstall(model)
    # Packing works on the host, so a compiled model packs outside of its graphs. Decorating here
    # rather than at import keeps Triton, which Dynamo imports, out of `import fastdpo`.
    choose: Any = torch.compiler.disable(deciding.choose, reason="packing works on the host")
    examine: Any = torch.compiler.disable(deciding.model_reason, reason="it runs once")
    reason = support.unsupported_reason(model)
    reason = reason or splitting.unsupported_reason(model, options)
    if reason is None and not prior_scores:
        reason = support.forward_unsupported_reason(model)
    transform = parts.logit_transform(text_config(model)) if prior_scores else None
    prior = model.forward, prior_scores, autocast_of(model.forward)
    runner = Runner(options.integration, options.role, options.sequence_group is None and options.compile)
    fused = FusedForward(options, make_output, *prior, transform, reason, choose, examine, runner, state_of(model))
    if reason is not None:
        fused.log_once(reason)

    def forward(self, *args, fused_lm_head=False, **kwargs):
        fused = cast(FusedForward, state_of(self))  # not from the closure: a deep copy of the model has its own
        is_outermost = fused.forward is forward
        while fused.forward is not forward:
            fused = cast(FusedForward, fused.inner)
        if not is_outermost:  # the one around it has replaced it
            options = {"fused_lm_head": True} if fused_lm_head else {}
            return fused.prior_forward(*args, **options, **kwargs)
        rewards = fused.options.rewards
        if isinstance(fused_lm_head, Reason) and self in MODELS:
            record_fallback(self, fused.options.integration, fused_lm_head)
            kwargs = {name: x for name, x in kwargs.items() if name not in SCORING_ARGUMENTS}
        elif fused_lm_head or (rewards and rewards.every_call):
            return _call(self, fused, args, kwargs)
        if torch.is_grad_enabled():
            fused.seen.add("other")
        if fused.is_awaited:
            fused.is_awaited = False
            fused.examine(self, fused, Call.of(kwargs, args).device or self.device)
        return fused.prior_forward(*args, **kwargs)

    # `generate` and Trainer read the signature. functools.wraps would set `__wrapped__`, which
    # accelerate follows.
    forward.__signature__ = inspect.signature(type(model).forward)
    fused.forward = forward
    model.forward = MethodType(forward, model)
    vars(model)[ATTRIBUTE] = fused
    pickling.install(model)
    MODELS.add(model)


def uninstall(model: PreTrainedModel) -> None:
    """Restores a model's forward, attention and head. Works for copies of a model, too."""
    fused = state_of(model)
    if fused is None:
        return
    MODELS.discard(model)
    if getattr(model.forward, "__func__", None) is fused.forward:
        del model.forward, vars(model)[ATTRIBUTE]
        if fused.prior_forward != model.forward:  # not that of the class
            model.forward = fused.prior_forward
        if fused.inner is None:
            pickling.uninstall(model)
        else:
            vars(model)[ATTRIBUTE] = fused.inner
    else:  # other code has wrapped our forward: stay in its chain, and pass calls on
        fused.lasting_reason = Reason("unpatched")
    restore(model, fused)


def uninstall_all(integration: str) -> None:
    """Uninstalls the fused forward of every model that an integration has installed it on."""
    for model, fused in states():
        if fused.options.integration == integration:
            uninstall(model)


def forwards_below(model: PreTrainedModel) -> Iterator[Callable]:
    """What has replaced the forward of a model's class, from the outermost function to the innermost, with those that
    the model had before it was given a fused forward.
    """
    forward, fused = vars(model).get("forward"), state_of(model)
    while forward is not None:
        yield forward
        if fused is not None and inner_function(forward) is fused.forward:
            forward, fused = fused.prior_forward, fused.inner
        else:
            forward = getattr(forward, "__wrapped__", None)


def is_installed(model: nn.Module, integration: str) -> bool:
    """Whether a model, or the one inside of it, has the fused forward of an integration."""
    return _find(model, integration) is not None


def begin_step(model: nn.Module, integration: str) -> None:
    """Forgets which calls of a model an integration has made so far."""
    fused = _find(model, integration)
    if fused is not None:
        fused.seen.clear()


def was_trained(model: nn.Module, integration: str) -> bool:
    """Whether the calls of a model that train it were those of an integration, as far as the calls since `begin_step`
    tell: some had gradients, or none had, as in methods that need the loss alone.
    """
    fused = _find(model, integration)
    return fused is not None and (
        "trained" in fused.seen or ("other" not in fused.seen and not fused.seen <= {"reference"})
    )


def is_fused(model: nn.Module) -> bool:
    """Whether calls of a model, or of the one inside of it, may take the fused path."""
    fused = state_of(find_base(model))
    return fused is not None and fused.unsupported_reason() is None


def will_be_fused(model: nn.Module, *, in_doubt: bool) -> bool:
    """Whether a model, as it is now, is one whose calls take the fused path. It is examined if need be.

    Args:
        model: the model, which may be wrapped.
        in_doubt: the answer if ranks run the model together and have not examined it yet: they do in a call.
    """
    base = find_base(model)
    fused = state_of(base)
    is_known = in_doubt or base is None or fused is None or not is_sharded(base) or fused.was_examined(base)
    return is_known and fallback_reason(model) is None


def fallback_reason(model: nn.Module) -> Reason | None:
    """Why calls of a model as it is now fall back, whatever batch they are given, or None. It is examined if need be,
    unless ranks run it together: they do in a call.

    Without a reason, the results of a row do not depend on the batch that it is in.
    """
    base = find_base(model)
    fused = state_of(base)
    if base is None or fused is None:
        return Reason("unpatched")
    if is_sharded(base):
        return fused.unsupported_reason()
    with torch.set_grad_enabled(base.training):
        reason = fused.examine(base, fused, input_device_of(base))
    if reason is None and base.training and getattr(base.get_input_embeddings(), "neftune_noise_alpha", None):
        return Reason("neftune")
    verdict = cast(Verdict, fused.verdict)
    return reason or verdict.scoring_reason or verdict.packing_reason


def unsupported_reason(model: nn.Module, integration: str) -> Reason | None:
    """Why all calls of a model fall back. None if they do not, or if that is not known yet."""
    fused = _find(model, integration)
    return None if fused is None else fused.unsupported_reason()


def is_random(model: nn.Module, integration: str) -> bool:
    """Whether a model draws random numbers in training mode, as far as is known before its first call."""
    fused = _find(model, integration)
    return fused is not None and fused.is_random(cast("PreTrainedModel", find_base(model)))


def logged_reasons(model: nn.Module, integration: str) -> frozenset[Reason]:
    """The reasons for which calls of a model have fallen back so far."""
    fused = _find(model, integration)
    return frozenset() if fused is None else frozenset(reason for _, reason in fused.logged if reason is not None)


def examine_again(model: nn.Module, integration: str) -> None:
    """Forgets how a model was found in its calls so far, so that its next call probes it.

    Every rank of those that run the model together must call this.
    """
    fused = _find(model, integration)
    if fused is not None:
        fused.probe_results.clear()
        fused.structure = Structure()


def forget_weights(model: PreTrainedModel) -> None:
    """Has a model examined again whose hidden states were not finite: it may have other weights by now. Every rank of
    those that run the model together must call this.
    """
    fused = cast(FusedForward, state_of(model))
    reasons = ((key, x.unsupported_reason) for key, x in fused.probe_results.items())
    for key in [key for key, reason in reasons if reason is not None and reason.name == "not-finite"]:
        del fused.probe_results[key]
        fused.structure.forget_verdicts()


def record_fallback(model: nn.Module, integration: str, reason: Reason) -> None:
    """Counts and logs a call that an integration leaves to its trainer before the model sees it.

    The trainer must run the same modules in that call as a fused one does, which the model's own forward
    does: ranks that run the model together may not all leave it.
    """
    base, fused = cast("PreTrainedModel", find_base(model)), cast(FusedForward, _find(model, integration))
    fused.see(base)
    fused.is_awaited = not fused.was_examined(base) and is_sharded(base)
    kind = fused.kind_of_call(base)
    calls[integration, kind, "stock"] += 1
    fused.log_once(fused.unsupported_reason() or reason, kind)


def _find(model: nn.Module, integration: str) -> FusedForward | None:
    """The state of a model, or of the one inside of it, if it has the fused forward of this integration."""
    base = find_base(model)
    fused = None if base is None or base not in MODELS else state_of(base)
    return fused if fused is not None and fused.options.integration == integration else None


def _call(model: PreTrainedModel, fused: FusedForward, args: tuple, kwargs: dict) -> object:
    rewards, given = fused.options.rewards, kwargs
    if rewards:
        kwargs = rewards.with_scored_tokens(model, kwargs)
    call = Call.of(kwargs, args)
    batch = fused.choose(model, fused, call)
    if batch is not None:
        return fused.make_output(score(model, fused, batch, call), kwargs)
    if rewards and rewards.every_call:  # a call of any code, which may have labels of its own
        return fused.prior_forward(*args, **given)
    return prior_output(fused, call)
