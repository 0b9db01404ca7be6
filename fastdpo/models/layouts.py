"""The layout of a padded batch, computed once for all models that are called with the same tensors."""

from __future__ import annotations

import weakref
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import packing
from ..packing import Layout

_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cached layouts by the labels of their batch: weak references to its other tensors, what the
layout depends on, and the layout.
"""


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

Groups = Literal["content", "prompts", "pairs"]
"""Which rows of a batch may share the tokens that they begin with: rows that begin alike, rows with
the same tokens up to their first label, or rows i and i + R/2.
"""


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
    tensors = batch[:3]
    if any(x.is_inference() for x in tensors):  # they have no version, so a write to them would be missed
        return _pack(batch, groups, store_all, reach)
    version = (batch.shifted, groups, store_all, reach, *(x._version for x in tensors))
    cached = _layouts.get(batch.labels)
    if cached is not None:
        others, cached_version, layout = cached
        if cached_version == version and others[0]() is batch.input_ids and others[1]() is batch.attention_mask:
            return layout
    layout = _pack(batch, groups, store_all, reach)
    _layouts[batch.labels] = (weakref.ref(batch.input_ids), weakref.ref(batch.attention_mask)), version, layout
    return layout


def _pack(batch: PaddedBatch, groups: Groups | None, store_all: bool, reach: int | None) -> Layout:
    rows = len(batch.input_ids)
    members: Tensor | Literal["content", "prompts"] | None = None if groups == "pairs" else groups
    if groups == "pairs" and rows and rows % 2 == 0:
        members = torch.arange(rows, device="cpu") % (rows // 2)
    tensors = batch[:3]
    return packing.pack(*tensors, groups=members, shifted=batch.shifted, store_all=store_all, reach=reach)
