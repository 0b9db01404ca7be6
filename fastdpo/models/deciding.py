"""Decides whether a call is fused: from its arguments, from the model as it is now, and from its batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .. import packing
from ..ops.choice.tuning import bucket
from ..ops.devices import is_transformed
from ..packing import Form, Groups, Layout, NotPackable
from ..reasons import Reason
from . import attention, images
from .batch import CALL_ARGUMENTS, IMAGE_ARGUMENTS, Call, count_real_tokens, layout_of_call
from .examine import probe, support
from .examine.examination import examined, verdict_about
from .examine.verification import audit
from .installing import restore
from .ranks import sharding, splitting
from .ranks.sequence_group import Part
from .state import FusedForward, ProbeKey, Route, RunnableBatch, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def choose(model: PreTrainedModel, fused: FusedForward, call: Call) -> RunnableBatch | None:
    """How a call runs. It is audited, if that is due, and counted. None, with a logged reason, if it falls back."""
    fused.see(model)
    if fused.options.sequence_group is None:
        route = _route(model, fused, call)
    else:
        found = functools.partial(_route, model, fused, call)
        route = splitting.agreed(found, fused, call.batch.input_ids, call.device or model.device)
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
    reason = model_reason(model, fused, call.device or model.device)
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
    reason = call.batch.form_reason()
    if reason is not None:
        return reason
    if call.batch.has_positions and not count_real_tokens(kwargs["position_ids"], mask):
        return Reason("positions")
    if model.training and getattr(model.get_input_embeddings(), "neftune_noise_alpha", None):
        return Reason("neftune")
    reason = options.split_reason()
    return images.unsupported_reason(model, call) if reason is None and call.has_images else reason


def _packed(model: PreTrainedModel, fused: FusedForward, verdict: Verdict, call: Call) -> RunnableBatch:
    """The packed batch, of text or with images. What is not known of it since the model was examined is examined
    before it is run.

    Raises:
        NotPackable: the batch has no packed form.
    """
    batch, routes, group, runner = call.batch, _routes(verdict, call), fused.options.sequence_group, fused.runner
    is_run = runner.device in (None, batch.input_ids.device.type) and runner.is_on()
    obstacle = None
    if is_run or group is not None:
        obstacle = "is given images" if call.has_images else _obstacle(model, fused, routes)
    if group is not None and obstacle is not None:
        raise NotPackable(Reason("sequence-model", model=type(model).__name__, kind=obstacle))
    if is_run:
        kind = fused.kind_of_call(model)
        runner.begin(model, fused.structure, verdict.backbone, verdict, kind, obstacle)

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


def _obstacle(model: PreTrainedModel, fused: FusedForward, routes: bool) -> str | None:
    """What of a call of text can neither be recorded nor shared by ranks, if anything."""
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


def model_reason(model: PreTrainedModel, fused: FusedForward, device: torch.device) -> Reason | None:
    """Returns why the model is not supported, whatever a call is given. Ranks that run it together get the
    same result. If there is no lasting reason, `fused.verdict` is that about the model as it is.
    """
    lasting = fused.lasting_reason_of(model)
    if lasting is not None:
        if not fused.was_examined(model):  # other ranks may not have this reason
            key = ProbeKey(0, model.training, sharding.is_sharded(model), int(model.training))
            fused.probe_results[key] = examined(model, fused, device)
        return lasting
    identity = fused.structure.identity(model)
    verdict: Verdict | None = identity.verdict
    if verdict is None or not verdict.key.covers(identity.trained):
        verdict = verdict_about(model, fused, identity, device)
        is_changing = verdict.packing_reason is not None and verdict.packing_reason.name == "changing-model"
        if not is_changing:  # of which each call counts
            fused.structure.identity(model).verdict = verdict  # with the attention and the head that it now has
    fused.verdict = verdict
    return verdict.reason
