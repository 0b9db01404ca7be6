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
from ..packing import Layout
from ..reasons import Reason
from .state import FusedForward, Groups
from .support import returns_router_logits, rope_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What each layout depends on, and the layout, by the labels of its batch, or by what these follow from if the layout
came with it.
"""

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


def layout_of(batch: PaddedBatch, *, groups: Groups | None, store_all: bool, reach: int | None) -> Layout:
    """The layout of a batch. A second call with the same unmodified tensors returns the same
    object.

    Args:
        batch: the rows.
        groups: which of them may share a prefix, which is then stored once. None: no rows do.
        store_all: store tokens that no other depends on, too.
        reach: number of positions that rotary embeddings must see, or None for as many as there
            are.

    Raises:
        NotPackable: the batch has no packed form.
    """
    if any(x.is_inference() for x in batch[:3]):  # they have no version, so a write to them would be missed
        return pack(batch, groups, store_all, reach)
    how = batch.shifted, groups, store_all, reach
    sources = (batch.labels, None), *_sources.get()
    layout = next(filter(None, (_kept(key, batch, (*how, padding)) for key, padding in sources)), None)
    if layout is None:
        layout = pack(batch, groups, store_all, reach)
    _keep(batch.labels, batch, (*how, None), layout)
    return layout


def keep(inputs: Mapping[str, Tensor], groups: Groups | None, layout: Layout, padding: int | None = None) -> None:
    """Keeps the layout that a batch has come with, for as long as its tensors exist and stay unmodified.

    Args:
        inputs: with "input_ids" and "attention_mask". Without `padding`, also with "labels" or with the
            "completion_mask" (see `labelling`).
        groups: as in `layout_of`.
        layout: on the device of the batch.
        padding: the id of padding, if the batch is that of a reward model.
    """
    is_scored = padding is not None
    source = inputs["input_ids" if is_scored else "labels" if "labels" in inputs else "completion_mask"]
    batch = PaddedBatch(inputs["input_ids"], inputs["attention_mask"], source, shifted=is_scored)
    if not any(x.is_inference() for x in batch[:3]):
        _keep(source, batch, (is_scored, groups, False, None, padding), layout)


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


def _kept(key: Tensor, batch: PaddedBatch, how: tuple) -> Layout | None:
    kept = _layouts.get(key)
    return kept[1] if kept is not None and kept[0] == _state(key, batch, how) else None


def _keep(key: Tensor, batch: PaddedBatch, how: tuple, layout: Layout) -> None:
    _layouts[key] = _state(key, batch, how), layout


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
