"""The layout of a padded batch, computed once for all models that are called with the same tensors.

A batch may also come with a layout, which was made where the batch was collated: there the host has the ids.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import packing
from ..packing import Layout

_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Layouts by the labels of their batch, or by what these follow from if the layouts came with it: weak references
to its other tensors, what the layout depends on, and the layout.
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


def padded_batch(kwargs: dict) -> PaddedBatch:
    """The batch in the keyword arguments of a model call."""
    shifted = kwargs.get("shift_labels") is not None
    labels = kwargs["shift_labels" if shifted else "labels"]
    return PaddedBatch(kwargs["input_ids"], kwargs["attention_mask"], labels, shifted)


SharePrompts = bool | Literal["deterministic"]
"""Whether rows share what they begin with: always, never, or only where a model is not random."""

Groups = Literal["content", "pairs"]
"""Which rows of a batch may share the tokens that they begin with: rows that begin alike, or rows i and i + R/2."""


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
    if kept is None:
        return None
    others, version, layout = kept
    is_same = others[0]() is batch.input_ids and others[1]() is batch.attention_mask
    return layout if is_same and version == _version(key, batch, how) else None


def _keep(key: Tensor, batch: PaddedBatch, how: tuple, layout: Layout) -> None:
    others = weakref.ref(batch.input_ids), weakref.ref(batch.attention_mask)
    _layouts[key] = others, _version(key, batch, how), layout


def _version(key: Tensor, batch: PaddedBatch, how: tuple) -> tuple:
    return *how, *(x._version for x in (key, batch.input_ids, batch.attention_mask))


def pack(batch: PaddedBatch, groups: Groups | None, store_all: bool = False, reach: int | None = None) -> Layout:
    """A new layout of a batch. The arguments are those of `layout_of`."""
    rows = len(batch.input_ids)
    members: Tensor | Literal["content"] | None = None if groups == "pairs" else groups
    if groups == "pairs" and rows and rows % 2 == 0:
        members = torch.arange(rows, device="cpu") % (rows // 2)
    tensors = batch[:3]
    return packing.pack(*tensors, groups=members, shifted=batch.shifted, store_all=store_all, reach=reach)
