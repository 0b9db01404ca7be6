"""Examines a model that is new or has changed: what rules it out, and what a probe of it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...distributed import gather_objects
from ...reasons import Reason
from .. import adapters, head
from ..installing import install_head, restore, switch_attention
from ..ranks import sharding
from ..ranks.sharding import shared_reason
from ..state import ForwardOptions, FusedForward, ProbeKey, Verdict, has_user_hooks, states
from . import probe, support
from .probe import ProbeResult
from .support import has_own_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..identity.structure import Identity

FREE_EXAMINATIONS = 6
"""Number of times that a model is examined as soon as it has changed. It may change in each step. From then on, it is
only audited if nothing but values has changed.
"""

MAX_PROBE_RESULTS = 16
"""Number of structures of a model whose probe results are kept, for
models that are switched back and forth.
"""


def scoring_unsupported_reason(model: PreTrainedModel, options: ForwardOptions) -> Reason | None:
    """Returns why a model's head, as it is now, cannot score the targets of any call, or None if it can."""
    reason = options.split_reason()
    if reason is not None:
        return reason
    if options.rewards:
        return options.rewards.unsupported_reason(model)
    return head.unsupported_reason(head.head_of(model), float32=options.float32_head)


def verdict_about(model: PreTrainedModel, fused: FusedForward, identity: Identity, device: torch.device) -> Verdict:
    """Examines a model that has changed, and switches its attention and its head.

    It is probed once in training and once in evaluation mode, with the gradients that it needs, and again when its
    structure has another hash, before anything is computed with it, unless ranks run it together: it may have changed
    on this rank alone. All of them probe it again once an engine has sharded it.
    """
    is_sharded, results = sharding.is_sharded(model), fused.probe_results
    scoring_reason, packing_reason = scoring_unsupported_reason(model, fused.options), None
    present = ProbeKey(identity.hash, model.training, is_sharded, identity.trained, identity.form)
    known = [x for x in results if x[:3] == present[:3] and x.covers(present.trained)]
    alike = [x for x in results if (x[1:3], x.form) == (present[1:3], present.form) and x.covers(present.trained)]
    has_changed = not known and not is_sharded and fused.examinations >= FREE_EXAMINATIONS
    if has_changed:  # in which each call would be the first of its kind
        known = [x for x in alike[-1:] if results[x].unsupported_reason is None]
    key = max(known, key=lambda x: (x == present, x.trained != 0), default=present)
    ruled_out = _ruled_out(model, fused, identity)
    is_known = bool(known) or ruled_out is not None
    if not is_known and not (fused.was_examined(model) if is_sharded else scoring_reason):
        if not is_sharded and _is_changing(fused, key):
            packing_reason = Reason("changing-model", model=type(model).__name__)
        else:
            if len(results) >= MAX_PROBE_RESULTS:
                results.clear()
                fused.image_results.clear()
            reason = adapters.unsupported_reason(model)
            results[key] = examined(model, fused, device) if reason is None else ProbeResult(reason)
            fused.audited.clear()
            _rule_out(fused, identity, results[key].unsupported_reason)
    result = results.get(key, fused.probe_result if is_sharded else None)
    if ruled_out is not None:
        result = ProbeResult(ruled_out)
        if identity.kinds not in fused.ruled_out:
            fused.ruled_out[identity.code] = ruled_out
    elif key not in results:
        packing_reason = packing_reason or Reason("changed-model")
    elif results[key].packing_reason is not None:
        packing_reason = results[key].packing_reason
    elif model.training and results[key].attention_dropout:
        packing_reason = Reason("attention-dropout")
    if result is not None and result.unsupported_reason is not None:
        restore(model, fused)
    elif scoring_reason is None:
        if packing_reason is None:
            switch_attention(model, fused)
        install_head(model, fused)
    return Verdict.of(model, key, result, scoring_reason, packing_reason, has_changed)


def _is_changing(fused: FusedForward, key: ProbeKey) -> bool:
    """Whether a model that was examined often must first stay the same for some calls, for twice as many each time."""
    often = fused.examinations - FREE_EXAMINATIONS
    if len(fused.sightings) >= MAX_PROBE_RESULTS:
        fused.sightings.clear()
    fused.sightings[key] += 1
    if often >= 0 and fused.sightings[key] <= 2**often:
        return True
    fused.examinations += 1
    fused.sightings.clear()
    return False


def _rule_out(fused: FusedForward, identity: Identity, reason: Reason | None) -> None:
    """Notes that a model was compared and is not supported, and has equal models look for it."""
    if reason is not None and reason.name in probe.COMPARED:
        fused.ruled_out[identity.kinds if reason.name == "keeps-state" else identity.code] = reason
        for _, other in states():
            other.structure.forget_verdicts()


def _ruled_out(model: PreTrainedModel, fused: FusedForward, identity: Identity) -> Reason | None:
    """Why a model is not supported, as far as another one tells, such as the policy of a reference. The two are
    compared with each other, and so models of the same trainer and of equal code run alike.

    A model that once kept state may not do so in another state. It is not examined again.
    """
    known = [fused.ruled_out.get(identity.kinds)]
    for other, x in states():
        if other is not model and x.options.integration == fused.options.integration:
            known += [x.ruled_out.get(identity.kinds), x.ruled_out.get(identity.code)]
    return next((reason for reason in known if reason is not None), None)


def examined(model: PreTrainedModel, fused: FusedForward, device: torch.device) -> ProbeResult:
    """The result of a probe, unless something rules the model out before."""
    reason = fused.lasting_reason_of(model) or support.unsupported_reason(model)
    reason = shared_reason(model, reason or scoring_unsupported_reason(model, fused.options))
    if reason is not None:
        return ProbeResult(reason)
    hooks = shared_reason(model, support.hooks_reason(model))
    if hooks is not None:
        # ZeRO-3 expects the modules that have run before, and so the head after padded rows.
        ran_fused = any(x.unsupported_reason is None for x in fused.probe_results.values())
        runs_padded = sharding.is_sharded(model) and ran_fused
        return ProbeResult(None, packing_reason=hooks) if runs_padded else ProbeResult(hooks)
    reason = shared_reason(model, _installing_reason(model, fused))
    if reason is not None:
        return ProbeResult(reason)
    result = probe.probe(model, device, fused.options.special_ids)
    if result.unsupported_reason is None and not fused.prior_scores:
        rewards = fused.options.rewards
        differs = probe.score_difference(model, device, rewards) if rewards else probe.head_difference(model, device)
        reason = shared_reason(model, differs)
        result = result._replace(unsupported_reason=reason)
    if sharding.is_sharded(model):
        result = result._replace(is_audited=any(gather_objects(has_own_code(model) or has_user_hooks(model))))
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
