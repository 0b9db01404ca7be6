"""The forms in which `fastdpo.score` takes rows, each made into the arguments of a call on padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import checks
from ..models.parts import input_device_of, text_config
from ..packing import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OP = "score"

Rows = Tensor | Sequence[Sequence[int] | Tensor]
"""Ids or labels of rows: padded or flat in a tensor, or in a list with an entry for each row."""


def padded_call(
    base: PreTrainedModel,
    input_ids: Rows,
    attention_mask: Tensor | None,
    labels: Rows,
    shifted: bool,
    cu_seqlens: Tensor | None,
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """The arguments of a model call on padded rows, with those in `kwargs`. The others are those of `fastdpo.score`."""
    name = "shift_labels" if shifted else "labels"
    if not isinstance(input_ids, Tensor) or cu_seqlens is not None:
        checks.require(attention_mask is None, OP, "attention_mask", "be None for rows that are not padded", "a mask")
        if isinstance(input_ids, Tensor):
            lengths = _lengths(input_ids, cu_seqlens, kwargs.pop("position_ids", None))
            checks.require_tensors(OP, labels=labels)
            of_labels = labels.numel()  # pyright: ignore[reportAttributeAccessIssue]
            checks.require(of_labels == input_ids.numel(), OP, "labels", "have {} tokens", of_labels, input_ids.numel())
            input_ids, labels = (x.flatten().split(lengths) for x in (input_ids, labels))  # pyright: ignore
        device = input_device_of(base)
        ids, targets = ([torch.as_tensor(row, device=device) for row in rows] for rows in (input_ids, labels))
        fit = [x.shape for x in ids] == [x.shape for x in targets] and len(ids) > 0
        checks.require(fit, OP, "labels", "be rows of the lengths of input_ids", [*map(len, targets)])
        input_ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        labels = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX)
        attention_mask = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    checks.require_tensors(OP, input_ids=input_ids, labels=labels)
    shape = list(input_ids.shape)
    checks.require(len(shape) == 2, OP, "input_ids", "be [R, L] without cu_seqlens", shape)
    checks.require(list(labels.shape) == shape, OP, name, "be {}", list(labels.shape), shape)  # pyright: ignore
    if attention_mask is None:
        _require_padding_behind(base, input_ids)
        attention_mask = torch.ones_like(input_ids)
    return {**kwargs, "input_ids": input_ids, "attention_mask": attention_mask, name: labels}


def _lengths(ids: Tensor, cu_seqlens: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """The lengths of the rows of a flat batch."""
    checks.require_tensors(OP, cu_seqlens=cu_seqlens)
    bounds = torch.as_tensor(cu_seqlens, device="cpu")
    lengths = bounds.diff()
    ends = bounds.flatten()[[0, -1]].tolist() if bounds.numel() > 1 else []
    fit = bounds.dim() == 1 and ends == [0, ids.numel()] and bool((lengths >= 0).all())
    checks.require(fit, OP, "cu_seqlens", f"rise from 0 to the number of tokens, {ids.numel()}", bounds.tolist())
    if position_ids is not None:
        counted = torch.cat([torch.arange(n) for n in lengths.tolist()])
        counts = position_ids.numel() == len(counted) and torch.equal(position_ids.flatten().cpu(), counted)
        checks.require(counts, OP, "position_ids", "count from 0 in each row of cu_seqlens", "other positions")
    return lengths.tolist()


def _require_padding_behind(base: PreTrainedModel, ids: Tensor) -> None:
    """Raises an error if rows without a mask begin with padding, which the model would attend to."""
    config = text_config(base)
    padding, first = config.pad_token_id, 1 + (config.pad_token_id == config.bos_token_id)
    if padding is not None and ids.shape[1] > first:
        on_the_left = bool((ids[:, :first] == padding).all(1).any())
        rule = "be given for rows that are padded on the left"
        checks.require(not on_the_left, OP, "attention_mask", rule, "None, and rows that begin with padding")
