"""Which calls are split over the ranks of a sequence group. One that is not raises an error on all of them, since each
rank would run the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from ..logs import NotFused
from ..reasons import Reason
from . import facts
from .mixers import finding
from .sequence_group import SequenceGroup, digest_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .state import ForwardOptions, FusedForward, Route, RunnableBatch


def unsupported_reason(model: PreTrainedModel, options: ForwardOptions) -> Reason | None:
    """Why no call of a model is split, as far as its options, its configuration and its modules tell."""
    if options.sequence_group is None:
        return None
    given = [f"{name}=True" for name in ("compile", "verify") if getattr(options, name) is True]
    if given or options.newer:
        option = given[0] if given else f"{options.newer}, which is newer than the tested versions"
        return Reason("sequence-option", option=option)
    if finding.mixers_of(model):
        return _of_model(model, "mixes tokens outside of its attention")
    if facts.rope_limit(model) is not None:
        return _of_model(model, "has rotary embeddings that depend on the longest position of a batch")
    return _of_model(model, "has code of its own, which may depend on T") if facts.has_own_code(model) else None


def agreed(find: Callable[[], Route], fused: FusedForward, ids: object, device: torch.device) -> Route:
    """The route of a call, on which all ranks of the group agree. Every rank of it must call this.

    Args:
        find: finds the route.
        fused: the state of the model.
        ids: the ids of the call.
        device: of its arguments.

    Raises:
        NotFused: the call is not split, for the reason of the first rank that has one.
        ValueError: ranks were given different batches.
        Exception: that of `find`, or `NotFused` on the other ranks.
    """
    group, name = cast(SequenceGroup, fused.options.sequence_group), fused.options.integration
    route = error = None
    try:
        route = find()
        reason = route.reason or route.own
        refusal = "" if reason is None else reason.named
    except Exception as raised:  # which other ranks would wait for
        error, refusal = raised, f"{type(raised).__name__}: {raised}"
    digest = torch.zeros((), dtype=torch.int64, device=device)
    if not refusal:
        digest = digest_of(cast("RunnableBatch", cast("Route", route).batch).layout, cast(torch.Tensor, ids))
    if group.agree(bool(refusal), digest):
        return cast("Route", route)
    of_ranks = group.gather(refusal)
    if error is not None:
        raise error
    refusal = next(filter(None, of_ranks), None)
    if refusal is None:
        raise ValueError(f"{name}: ranks that share sequences must be given the same batch; got different ones")
    raise NotFused(f"{name}: the ranks of a sequence group cannot share a batch, {refusal}")


def _of_model(model: PreTrainedModel, kind: str) -> Reason:
    return Reason("sequence-model", model=type(model).__name__, kind=kind)
