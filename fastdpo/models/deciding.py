"""Decides whether a call is fused: from its arguments, from the model as it is now, and from its batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .. import packing
from ..distributed import gather_objects
from ..ops.choice.tuning import bucket
from ..ops.devices import is_transformed
from ..packing import Layout, NotPackable
from ..reasons import Reason
from . import adapters, attention, head, images
from .batch import CALL_ARGUMENTS, IMAGE_ARGUMENTS, Call, Form, count_real_tokens, layout_of_call
from .examine import probe, support
from .examine.probe import ProbeResult
from .examine.support import has_own_code
from .examine.verification import audit
from .ranks import sharding, splitting
from .ranks.sequence_group import Part
from .ranks.sharding import shared_reason
from .state import (
    ForwardOptions,
    FusedForward,
    Groups,
    ProbeKey,
    Route,
    RunnableBatch,
    Verdict,
    has_user_hooks,
    install_head,
    restore,
    states,
    switch_attention,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .identity.structure import Identity

FREE_EXAMINATIONS = 6
"""Number of times that a model is examined as soon as it has changed. It may change in each step. From then on, it is
only audited if nothing but values has changed.
"""

MAX_PROBE_RESULTS = 16
"""Number of structures of a model whose probe results are kept, for
models that are switched back and forth.
"""


def choose(model: PreTrainedModel, fused: FusedForward, call: Call) -> RunnableBatch | None:
    """How a call runs. It is audited, if that is due, and counted. None, with a logged reason, if it falls back."""
    fused.see(model)
    if fused.options.sequence_group is None:
        route = _route(model, fused, call)
    else:
        found = functools.partial(_route, model, fused, call)
        route = splitting.agreed(found, fused, call.batch.input_ids, device_of(model, call))
    if route.reason is None and fused.is_audited:
        reason = audit(model, fused, route.batch, call)
        if reason is not None:
            fused.lasting_reason = reason
            restore(model, fused)
            route = Route(None, reason)
    fused.count(model, call.kwargs.get("input_ids", call.args[0] if call.args else None), route)
    return route.batch


def _route(model: PreTrainedModel, fused: FusedForward, call: Call) -> Route:
    call_reason = None if fused.lasting_reason_of(model) else _call_reason(model, fused, call)
    if call_reason is not None and not sharding.is_sharded(model):
        return Route(None, own=call_reason)
    reason = model_reason(model, fused, device_of(model, call))
    if reason is not None:
        return Route(None, reason, call_reason)
    verdict = cast(Verdict, fused.verdict)
    call_reason = call_reason or verdict.scoring_reason
    own = call_reason or verdict.packing_reason
    if own is None:
        try:
            return Route(_packed(model, fused, verdict, call))
        except NotPackable as error:
            own = error.reason
    # The model's own forward, which `prior_forward` is otherwise, runs the same modules.
    runs_padded = sharding.is_sharded(model) and (fused.prior_scores or call_reason is None)
    return Route(_padded(fused, verdict, call) if runs_padded else None, own=own)


def _call_reason(model: PreTrainedModel, fused: FusedForward, call: Call) -> Reason | None:
    """Returns why the fused forward cannot take the arguments of a call, or None if it can."""
    if is_transformed():
        return Reason("transformed-call")
    if call.args:
        return Reason("positional-arguments")
    (ids, mask, labels, *_), kwargs, options = call.batch, call.kwargs, fused.options
    if ids is None or mask is None:
        return Reason("no-input-ids")
    if options.rewards:
        reason = options.rewards.unsupported_call_reason(model, kwargs)
    else:
        reason = None if fused.prior_scores else support.output_reason(model)
    if reason is not None:
        return reason
    if labels is None:
        return Reason("no-labels")
    others = options.rewards.ignored if options.rewards else IMAGE_ARGUMENTS if options.images else ()
    given = [name for name, x in kwargs.items() if x is not None and x is not False]
    unknown = [name for name in given if name not in CALL_ARGUMENTS and name not in others]
    if unknown:
        return Reason("unsupported-argument", names=", ".join(unknown))
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        kind = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        return Reason("attention-mask", given=kind)
    if call.batch.has_positions and not count_real_tokens(kwargs["position_ids"], mask):
        return Reason("positions")
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        return Reason("neftune")
    reason = options.split_reason()
    return images.unsupported_reason(model, call) if reason is None and call.has_images else reason


def scoring_unsupported_reason(model: PreTrainedModel, options: ForwardOptions) -> Reason | None:
    """Returns why a model's head, as it is now, cannot score the targets of any call, or None if it can."""
    reason = options.split_reason()
    if reason is not None:
        return reason
    if options.rewards:
        return options.rewards.unsupported_reason(model)
    return head.unsupported_reason(head.head_of(model), float32=options.float32_head)


def _packed(model: PreTrainedModel, fused: FusedForward, verdict: Verdict, call: Call) -> RunnableBatch:
    """The packed batch, of text or with images. What is not known of it since the model was examined is examined
    before it is run.

    Raises:
        NotPackable: the batch has no packed form.
    """
    batch, routes, group = call.batch, _routes(verdict, call), fused.options.sequence_group
    is_run = fused.runner.is_on(batch.input_ids.device)
    obstacle = _obstacle(model, fused, call.has_images, routes) if is_run or group is not None else None
    if group is not None and obstacle is not None:
        raise NotPackable(Reason("sequence-model", model=type(model).__name__, kind=obstacle))
    if is_run:
        kind = fused.kind_of_call(model)
        fused.runner.begin(model, fused.structure, verdict.backbone, verdict, kind, obstacle)

    def layout_of(groups: Groups | None = fused.options.groups, tokens: Callable[[int], int] | None = None) -> Layout:
        return layout_of_call(model, fused, batch, Form(groups, store_all=routes or verdict.stores_all, tokens=tokens))

    if not call.has_images:
        layout = layout_of(tokens=group and group.rounded_up)
        _require_ids(layout, verdict.vocabulary)
        inputs = attention.inputs_of(layout, batch.input_ids)
        packed = RunnableBatch(layout, inputs, (), verdict.configs, routes=routes, is_run=is_run)
        reason = _length_reason(model, fused, packed, layout_of, call) if verdict.has_own_code else None
    elif sharding.is_sharded(model):
        raise NotPackable(Reason("image-ranks"))
    else:
        packed = images.pack(model, call, layout_of)._replace(configs=verdict.configs, routes=routes)
        reason = images.examined_reason(model, fused, packed, call)
    if reason is not None:
        raise NotPackable(reason)
    if group is None:
        return packed
    part = Part.of(group, packed.layout)
    return packed._replace(inputs=part.inputs(packed.layout, packed.inputs), part=part)


def _require_ids(layout: Layout, vocabulary: int | None) -> None:
    """Raises NotPackable at ids outside of the model's embeddings. The model raises there, and a packed batch may lack
    them.
    """
    least, largest = layout.id_range or (0, 0)
    if vocabulary is not None and not 0 <= least <= largest < vocabulary:
        raise NotPackable(Reason("ids-outside", least=least, largest=largest, size=vocabulary))


def _obstacle(model: PreTrainedModel, fused: FusedForward, has_images: bool, routes: bool) -> str | None:
    """What of a call can neither be recorded nor shared by ranks, if anything."""
    if has_images:
        return "is given images"
    if routes:
        return "trains its routers"
    return "draws random numbers" if model.training and fused.is_random(model) else None


def _length_reason(
    model: PreTrainedModel, fused: FusedForward, packed: RunnableBatch, layout_of: Callable[..., Layout], call: Call
) -> Reason | None:
    """Why a batch of a model with code of its own must be run padded, or None. Its packed states are compared with its
    padded ones if more tokens are packed than were examined: a layer may scale by the length of its batch. The tokens
    are filled up to a power of 2.
    """
    key, tokens = cast(Verdict, fused.verdict).key, len(packed.layout.token_index)
    is_sharded = sharding.is_sharded(model)
    examined = fused.examined_tokens.get(key, probe.LONG if is_sharded else probe.TOKENS)
    if tokens <= examined:
        return None
    if is_sharded:
        return Reason("examined-tokens", tokens=examined, model=type(model).__name__)
    layout = layout_of(tokens=bucket)
    result = probe.compare(model, layout, call.padded_inputs, attention.inputs_of(layout, call.batch.input_ids))
    if result.unsupported_reason is not None:
        fused.probe_results[key] = result
        fused.structure.forget_verdicts()
        return result.unsupported_reason
    fused.examined_tokens[key] = bucket(tokens)
    return None


def _padded(fused: FusedForward, verdict: Verdict, call: Call) -> RunnableBatch | None:
    """How a call runs padded, with the fused head, next to ranks that run their packed batches. None if
    it has no labels, or if the model's own forward is to run it.

    The backbone gets all that the call was given, as from TRL's forward. That forward reads the weight of
    the head, so if others have added hooks to the head or replaced its forward, they do not run here either.
    """
    _, mask, labels, shifted, _ = call.batch
    if labels is None or (fused.options.rewards and not fused.options.rewards.runs_padded):
        return None
    mask = mask if isinstance(mask, Tensor) and mask.shape == labels.shape else torch.ones_like(labels)
    layout = packing.padded_layout(labels, mask, labels, shifted)
    bare, routes = verdict.scoring_reason is not None, _routes(verdict, call)
    return RunnableBatch(layout, call.padded_inputs, call.args, bare_head=bare, routes=routes)


def _routes(verdict: Verdict, call: Call) -> bool:
    """Whether a call asks for router logits."""
    return verdict.routes if call.routes is None else call.routes


def device_of(model: PreTrainedModel, call: Call) -> torch.device:
    """The device of a call's arguments."""
    given = (call.batch.input_ids, *call.args, *call.kwargs.values())
    return next((x.device for x in given if isinstance(x, Tensor)), None) or model.device


def model_reason(model: PreTrainedModel, fused: FusedForward, device: torch.device) -> Reason | None:
    """Returns why the model is not supported, whatever a call is given. Ranks that run it together get the
    same result. If there is no lasting reason, `fused.verdict` is that about the model as it is.
    """
    lasting = fused.lasting_reason_of(model)
    if lasting is not None:
        if not fused.was_examined(model):  # other ranks may not have this reason
            key = ProbeKey(0, model.training, sharding.is_sharded(model), int(model.training))
            fused.probe_results[key] = _examine(model, fused, device)
        return lasting
    identity = fused.structure.identity(model)
    verdict: Verdict | None = identity.verdict
    if verdict is None or not _covers(verdict.key, identity.trained):
        verdict = _verdict(model, fused, identity, device)
        is_changing = verdict.packing_reason is not None and verdict.packing_reason.name == "changing-model"
        if not is_changing:  # of which each call counts
            fused.structure.identity(model).verdict = verdict  # with the attention and the head that it now has
    fused.verdict = verdict
    return verdict.reason


def _covers(key: ProbeKey, trained: int) -> bool:
    """Whether the gradients that a call needs, of parameters that are trained, were compared in a probe."""
    return key.trained == trained or not (trained and torch.is_grad_enabled())


def _verdict(model: PreTrainedModel, fused: FusedForward, identity: Identity, device: torch.device) -> Verdict:
    """Examines a model that has changed, and switches its attention and its head.

    It is probed once in training and once in evaluation mode, with the gradients that it needs, and again when its
    structure has another hash, before anything is computed with it, unless ranks run it together: it may have changed
    on this rank alone. All of them probe it again once an engine has sharded it.
    """
    is_sharded, results = sharding.is_sharded(model), fused.probe_results
    scoring_reason, packing_reason = scoring_unsupported_reason(model, fused.options), None
    present = ProbeKey(identity.hash, model.training, is_sharded, identity.trained, identity.form)
    known = [x for x in results if x[:3] == present[:3] and _covers(x, present.trained)]
    alike = [x for x in results if (x[1:3], x.form) == (present[1:3], present.form) and _covers(x, present.trained)]
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
            results[key] = _examine(model, fused, device) if reason is None else ProbeResult(reason)
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


def _examine(model: PreTrainedModel, fused: FusedForward, device: torch.device) -> ProbeResult:
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
