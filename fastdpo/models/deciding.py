"""Decides whether a call is fused: from its arguments, from the model as it is now, and from its batch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ..logs import report, strict
from ..packing import NotPackable
from ..reasons import Reason
from . import calls, head, images, probe, support
from .laying_out import packed_call, padded_call
from .probe import ProbeResult
from .scoring import verify
from .sharding import is_sharded, shared_reason
from .state import FusedForward, RunnableBatch, disabled_reason, restore, switch_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_PROBE_RESULTS = 16
"""Number of structures of a model whose probe results are kept, for
models that are switched back and forth.
"""


def choose(model: PreTrainedModel, fused: FusedForward, args: tuple, kwargs: dict) -> RunnableBatch | None:
    """Decides how a call runs, verifies it, and counts it. Returns None, with a logged reason, if it falls back.

    Ranks that run a model together must run the same modules in the same order. In their first call
    they agree on whether the model is supported (`model_reason`). Any other reason is `own`: a rank may
    have it alone, and then runs the modules on its padded batch.
    """
    fused.was_called = True
    batch, path, reason = None, "stock", None
    own = call_reason = None if disabled_reason(model, fused) else _call_reason(model, fused, args, kwargs)
    if call_reason is None or is_sharded(model):
        reason = model_reason(model, fused, device_of(model, args, kwargs))
    if reason is None and call_reason is None:
        try:
            batch, path = packed_call(model, fused, kwargs), "fused"
        except NotPackable as error:
            own = error.reason
    if reason is None and own is not None and is_sharded(model):
        # The model's own forward, which `prior_forward` is otherwise, runs the same modules.
        batch = padded_call(model, fused, args, kwargs) if fused.prior_scores or call_reason is None else None
        path = "stock" if batch is None else "padded"
    if batch is not None and fused.options.is_compared and torch.is_grad_enabled() not in fused.verified:
        reason = fused.disabled_reason = verify(model, fused, batch, args, kwargs)
        if reason is not None:
            restore(model, fused)
            batch, path = None, "stock"
    integration = fused.options.integration
    calls.calls[integration, kind_of_call(model, fused), path] += 1
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(ids, Tensor):
        used = (batch.layout.unshared, len(batch.layout.token_index)) if batch else (ids.numel(), ids.numel())
        calls.count_tokens(integration, ids.numel(), *used)
    if reason is not None or own is not None:
        log_once(fused, cast(Reason, reason or own))
    return batch


def _call_reason(model: PreTrainedModel, fused: FusedForward, args: tuple, kwargs: dict) -> Reason | None:
    """Why the fused forward cannot take a call."""
    options = fused.options
    others = options.rewards.ignored if options.rewards else images.ARGUMENTS if options.images else ()
    reason = support.call_unsupported_reason(model, args, kwargs, others=others, **options.of_head)
    return reason or images.unsupported_reason(model, kwargs)


def device_of(model: PreTrainedModel, args: tuple, kwargs: dict) -> torch.device:
    """The device of a call's arguments."""
    given = (kwargs.get("input_ids"), *args, *kwargs.values())
    return next((x.device for x in given if isinstance(x, Tensor)), None) or model.device


def model_reason(model: PreTrainedModel, fused: FusedForward, device: torch.device) -> Reason | None:
    """Returns why the model is not supported, whatever a call is given. Ranks that run it together get the
    same result.

    A model whose structure has changed is examined again, before anything is computed with it, unless
    ranks run it together: it may have changed on this rank alone.
    """
    disabled = disabled_reason(model, fused)
    if disabled is not None:
        if not fused.probe_results:  # other ranks may not have this reason
            fused.probe_results[fused.examined] = fused.probe_result = _examine(model, fused, device)
        return disabled
    structure = fused.examined = fused.structure.hash(model)
    results = fused.probe_results
    if structure not in results and not (results and is_sharded(model)):
        if len(results) >= MAX_PROBE_RESULTS:
            results.clear()
            fused.image_results.clear()
        results[structure] = _examine(model, fused, device)
    fused.probe_result = results.get(structure, fused.probe_result)
    reason = fused.unsupported_reason()
    if reason is not None:
        restore(model, fused)
    return reason


def _examine(model: PreTrainedModel, fused: FusedForward, device: torch.device) -> ProbeResult:
    reason = shared_reason(
        model,
        disabled_reason(model, fused)
        or support.unsupported_reason(model)
        or support.scoring_unsupported_reason(model, **fused.options.of_head),
    )
    if reason is not None:
        return ProbeResult(reason)
    reason = shared_reason(model, _installing_reason(model, fused))
    if reason is not None:
        return ProbeResult(reason)
    result = probe.probe(model, device)
    if result.unsupported_reason is None and not fused.prior_scores:
        rewards = fused.options.rewards
        differs = probe.score_difference(model, device, rewards) if rewards else probe.head_difference(model, device)
        reason = shared_reason(model, differs)
        result = result._replace(unsupported_reason=reason)
    return result


def _installing_reason(model: PreTrainedModel, fused: FusedForward) -> Reason | None:
    """Why the packed attention or the head cannot be installed: the package has other names than the tested ones."""
    try:
        switch_attention(model, fused)
        if not fused.options.rewards:
            head.install(head.head_of(model))
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        return Reason("cannot-install", model=type(model).__name__, error=f"{type(error).__name__}: {error}")
    finally:
        head.restore(head.head_of(model))
    return None


def kind_of_call(model: PreTrainedModel, fused: FusedForward) -> str:
    """The kind that a call is counted as (see `calls.calls`)."""
    kind = calls.kind_of_calls()
    if kind is not None:
        return kind
    if fused.options.role == "reward":
        return "reward"
    if fused.options.role == "reference" or _adapter_is_reference(model, fused):
        return "reference"
    if torch.is_grad_enabled():
        return "policy"
    return fused.options.kind_without_gradient if model.training else "eval"


def _adapter_is_reference(model: PreTrainedModel, fused: FusedForward) -> bool:
    """Whether PEFT's adapters are disabled, or switched to the copy that TRL names "ref"."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = cast("list[BaseTunerLayer]", fused.structure.modules_of(model, BaseTunerLayer))
    return bool(layers) and (layers[0].disable_adapters or "ref" in layers[0].active_adapters)


def log_once(fused: FusedForward, reason: Reason) -> None:
    """Reports a fallback, each reason once. In strict mode, raises each time."""
    if strict() or reason not in fused.logged:
        fused.logged.add(reason)
        report(f"{fused.options.integration} ({fused.options.role}): not fused, {reason.named}")
