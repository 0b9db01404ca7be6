"""The layout of a padded batch, computed once for all models that are called with the same tensors.

A batch may also come with a layout, which was made where the batch was collated: there the host has the ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from .. import packing
from ..logs import logger
from ..packing import IGNORE_INDEX, Layout
from ..reasons import Reason
from . import reward_head
from .state import FusedForward, Groups
from .support import returns_router_logits, rope_reason
from .unseen_writes import are_as_copied, copies_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What each layout depends on, and the layout, by the labels of its batch, or by what these follow from if the layout
came with it.
"""


class _Kept(NamedTuple):
    """A layout, and copies of the ids, the mask and the labels that it was made from."""

    layout: Layout
    copies: tuple[Tensor, ...]


_sources: ContextVar[tuple[tuple[Tensor, int | None], ...]] = ContextVar("fastdpo_sources", default=())


class PaddedBatch(NamedTuple):
    """The arguments of a model call that a layout is made from.

    Attributes:
        input_ids: int64 [R, L].
        attention_mask: [R, L], 0 at padding.
        labels: int64 [R, L], `IGNORE_INDEX` where a token is not scored.
        shifted: whether `labels` came as `shift_labels`: position i then holds the token that i
            predicts.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    shifted: bool


def labels_of_call(kwargs: dict) -> tuple[Any, bool]:
    """The labels in the keyword arguments of a model call, or None, and whether they came as `shift_labels`."""
    shifted = kwargs.get("shift_labels") is not None
    return kwargs.get("shift_labels" if shifted else "labels"), shifted


def count_real_tokens(position_ids: Any, attention_mask: Tensor) -> bool:
    """Whether positions count the real tokens of each row [R, L] from 0, as those of packed tokens do. One
    synchronization.
    """
    shapes = ((1, attention_mask.shape[1]), tuple(attention_mask.shape))
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) not in shapes:
        return False
    real = attention_mask != 0
    return bool(((position_ids == real.cumsum(1) - 1) | ~real).all())


def layout_of(batch: PaddedBatch, *, groups: Groups | None, store_all: bool, reach: int | None) -> Layout:
    """The layout of a batch. A second call with the same tensors returns the same object, unless one has been written
    to (see `unseen_writes` for writes that raise no version).

    Args:
        batch: the rows.
        groups: which of them may share a prefix, which is then stored once. None: no rows do.
        store_all: store tokens that no other depends on, too.
        reach: number of positions that rotary embeddings must see, or None for as many as there
            are.

    Raises:
        NotPackable: the batch has no packed form.
        RuntimeError: a batch on a device was written to unseen after it was packed.
    """
    if any(x.is_inference() for x in batch[:3]):  # they have no version, so a write to them would be missed
        return pack(batch, groups, store_all, reach)
    how = batch.shifted, groups, store_all, reach
    sources = (batch.labels, None), *_sources.get()
    kept = next(filter(None, (_kept(key, batch, (*how, padding)) for key, padding in sources)), None)
    if kept is None:
        kept = _Kept(pack(batch, groups, store_all, reach), copies_of(batch[:3]))
    _layouts[batch.labels] = _state(batch.labels, batch, (*how, None)), kept
    return kept.layout


def padded_batch(inputs: Mapping[str, Any], padding: int | None = None) -> PaddedBatch | None:
    """A collated batch, with the labels that a trainer computes from its "completion_mask" if it has none. None if it
    has no entries of text.

    Args:
        inputs: the batch.
        padding: the id of padding, if the batch is that of a reward model.
    """
    ids, mask, labels, completions = map(inputs.get, ("input_ids", "attention_mask", "labels", "completion_mask"))
    if not (isinstance(ids, Tensor) and isinstance(mask, Tensor)):
        return None
    is_scored = padding is not None
    if is_scored:
        labels = reward_head.labels_of(ids, padding)
    elif labels is None and isinstance(completions, Tensor) and completions.shape == ids.shape:
        labels = ids.masked_fill(completions == 0, IGNORE_INDEX)
    return PaddedBatch(ids, mask, labels, shifted=is_scored) if isinstance(labels, Tensor) else None


def keep(inputs: Mapping[str, Any], groups: Groups | None, layout: Layout, padding: int | None = None) -> None:
    """Keeps the layout that a batch has come with, for as long as its tensors exist and stay unmodified.

    Args:
        inputs: as in `padded_batch`, which is not None for them.
        groups: as in `layout_of`.
        layout: on the device of the batch.
        padding: as in `padded_batch`.
    """
    batch = cast(PaddedBatch, padded_batch(inputs, padding))
    source = inputs["input_ids" if batch.shifted else "labels" if "labels" in inputs else "completion_mask"]
    if not any(x.is_inference() for x in (*batch[:3], source)):
        state = _state(source, batch, (batch.shifted, groups, False, None, padding))
        _layouts[source] = state, _Kept(layout, copies_of(batch[:3]))


@contextmanager
def labelling(source: Tensor | None, padding: int | None = None) -> Iterator[None]:
    """In the block, the labels of a batch follow from a tensor, if it is given: they are its ids where this
    completion mask is not 0, or for a reward model with an id of padding, those of `reward_head` for these ids.
    """
    token = _sources.set(() if source is None else ((source, padding),))
    try:
        yield
    finally:
        _sources.reset(token)


def _kept(key: Tensor, batch: PaddedBatch, how: tuple) -> _Kept | None:
    found = _layouts.get(key)
    if found is None or found[0] != _state(key, batch, how):
        return None
    return found[1] if are_as_copied(batch[:3], found[1].copies) else None


def _state(key: Tensor, batch: PaddedBatch, how: tuple) -> tuple:
    others = batch.input_ids, batch.attention_mask
    return *how, *map(WeakIdRef, others), *(x._version for x in (key, *others))


def pack(batch: PaddedBatch, groups: Groups | None, store_all: bool = False, reach: int | None = None) -> Layout:
    """A new layout of a batch. The arguments are those of `layout_of`."""
    rows = len(batch.input_ids)
    members: Tensor | Literal["content"] | None = None if groups == "pairs" else groups
    if groups == "pairs" and rows and rows % 2 == 0:
        members = torch.arange(rows, device="cpu") % (rows // 2)
    tensors = batch[:3]
    return packing.pack(*tensors, groups=members, shifted=batch.shifted, store_all=store_all, reach=reach)


def layout_of_call(
    model: PreTrainedModel, fused: FusedForward, kwargs: dict, *, groups: Groups | None = None, share: bool = True
) -> Layout:
    """The layout of a packed call, with shared prompts if its options and the model's state allow it."""
    labels, shifted = labels_of_call(kwargs)
    batch = PaddedBatch(kwargs["input_ids"], kwargs["attention_mask"], labels, shifted)
    requested = fused.options.share_prompts
    share = share and requested is not False
    if share and requested == "deterministic" and model.training and is_random(model, fused):
        share = False
        if not fused.has_logged_dropout:
            fused.has_logged_dropout = True
            name, role = fused.options.integration, fused.options.role
            logger.info("fastdpo: %s (%s): prompts are not shared, %s", name, role, Reason("dropout").named)
    # All positions of the padded rows count, padding included.
    width = batch.input_ids.shape[1]
    reach = None if rope_reason(model, width) is None else width
    groups = (groups or fused.options.groups) if share else None
    return layout_of(batch, groups=groups, store_all=returns_router_logits(model, kwargs), reach=reach)


def is_random(model: PreTrainedModel, fused: FusedForward) -> bool:
    """Whether training is random. The probe misses dropout in an
    adapter whose weights are still zero.
    """
    seen = fused.probe_result is not None and fused.probe_result.is_random
    return seen or any(cast(nn.Dropout, x).p > 0 for x in fused.structure.modules_of(model, nn.Dropout))
