"""Which calls are split over the ranks of a sequence group. One that is not raises an error on all of them, since each
rank would run the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from ...distributed import gather_objects
from ...logs import NotFused
from ...reasons import Reason
from ..examine.support import has_own_code
from ..mixers import finding
from ..parts import rope_limit
from .sequence_group import SequenceGroup, digest_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..state import ForwardOptions, FusedForward, Route, RunnableBatch


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
    if rope_limit(model) is not None:
        return _of_model(model, "has rotary embeddings that depend on the longest position of a batch")
    return _of_model(model, "has code of its own, which may depend on T") if has_own_code(model) else None


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
        Exception: that of `find` on the first rank that has one.
    """
    group, name = cast(SequenceGroup, fused.options.sequence_group), fused.options.integration
    route, refusal = None, None
    try:
        route = find()
        reason = route.reason or route.own
        if reason is not None:
            refusal = NotFused(f"{name}: the ranks of a sequence group cannot share a batch, {reason.named}")
    except Exception as raised:  # which other ranks would wait for
        refusal = raised
    digest = torch.zeros((), dtype=torch.int64, device=device)
    if refusal is None:
        digest = digest_of(cast("RunnableBatch", cast("Route", route).batch).layout, cast(torch.Tensor, ids))
    if group.agree(refusal is not None, digest):
        return cast("Route", route)
    raise _first_of_ranks(group, refusal) or ValueError(
        f"{name}: ranks that share sequences must be given the same batch; got different ones"
    )


@contextmanager
def in_step(group: SequenceGroup | None, device: torch.device) -> Iterator[None]:
    """A block in which ranks agree on one call. An error before that is raised on all of them, which wait there.

    Args:
        group: of the ranks, or None if each has batches of its own.
        device: of the model.
    """
    before = group and group.agreements
    try:
        yield
    except Exception as error:
        if group is None or group.agreements != before:
            raise
        group.agree(True, torch.zeros((), dtype=torch.int64, device=device))
        raise cast(Exception, _first_of_ranks(group, error)) from error


def _first_of_ranks(group: SequenceGroup, own: Exception | None) -> Exception | None:
    """The error of the first rank that has one, which other ranks know by its kind and message."""
    kinds = (x for x in type(own).__mro__ if x is NotFused or x.__module__ == "builtins")
    errors = gather_objects(None if own is None else (next(kinds), str(own)), group.group)
    rank, (kind, message) = next(((i, x) for i, x in enumerate(errors) if x is not None), (-1, (Exception, "")))
    if rank in (-1, group.rank):
        return own
    try:
        return kind(message)
    except TypeError:  # of a kind with other arguments
        return RuntimeError(message)


def _of_model(model: PreTrainedModel, kind: str) -> Reason:
    return Reason("sequence-model", model=type(model).__name__, kind=kind)
