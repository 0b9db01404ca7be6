"""The forms in which `fastdpo.score` takes rows, each made into the arguments of a call on padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
        lengths, device = None, input_device_of(base)
        if isinstance(input_ids, Tensor):
            lengths = _lengths(input_ids, cu_seqlens, kwargs.pop("position_ids", None))
        ids, targets = (_rows(x, given, lengths, device) for x, given in (("input_ids", input_ids), (name, labels)))
        fit = [len(x) for x in ids] == [len(x) for x in targets] and len(ids) > 0
        checks.require(fit, OP, name, "be rows of the lengths of input_ids", [*map(len, targets)])
        input_ids = pad_sequence(ids, batch_first=True)
        labels = pad_sequence(targets, batch_first=True, padding_value=IGNORE_INDEX)
        attention_mask = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    batch: dict[str, Any] = {"input_ids": input_ids, name: labels}
    checks.require_tensors(OP, **batch)
    checks.require_ints(OP, **batch)
    shape = list(batch["input_ids"].shape)
    checks.require(len(shape) == 2, OP, "input_ids", "be [R, L] without cu_seqlens", shape)
    checks.require(list(batch[name].shape) == shape, OP, name, "be {}", list(batch[name].shape), shape)
    if attention_mask is None:
        _require_padding_behind(base, batch["input_ids"])
        attention_mask = torch.ones_like(batch["input_ids"])
    return {**kwargs, **batch, "attention_mask": attention_mask}


def _rows(name: str, given: object, lengths: list[int] | None, device: torch.device) -> list[Tensor]:
    """The rows of a flat tensor, by their lengths, or those in a list."""
    if lengths is not None and isinstance(given, Tensor):
        checks.require(given.numel() == sum(lengths), OP, name, "have {} tokens", given.numel(), sum(lengths))
        return [*given.flatten().split(lengths)]
    rule = "be a tensor, or a list of the ids of each row"
    is_list = lengths is None and isinstance(given, list | tuple) and all(hasattr(row, "__len__") for row in given)
    checks.require(is_list, OP, name, rule, checks.shown(given), error=TypeError)
    try:
        rows = cast("list[Any]", given)
        return [torch.as_tensor(row, dtype=None if len(row) else torch.long, device=device) for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{OP}: {name} must {rule}; got {checks.shown(given)}") from error


def _lengths(ids: Tensor, cu_seqlens: Tensor | None, position_ids: Tensor | None) -> list[int]:
    """The lengths of the rows of a flat batch."""
    checks.require_tensors(OP, cu_seqlens=cu_seqlens)
    bounds = torch.as_tensor(cu_seqlens, device="cpu")
    lengths = bounds.diff()
    ends = bounds.flatten()[[0, -1]].tolist() if bounds.numel() > 1 else []
    fit = bounds.dim() == 1 and ends == [0, ids.numel()] and bool((lengths >= 0).all())
    checks.require(fit, OP, "cu_seqlens", f"rise from 0 to the number of tokens, {ids.numel()}", bounds.tolist())
    if position_ids is not None:
        counted = torch.cat([torch.arange(n, device="cpu") for n in lengths.tolist()])
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
