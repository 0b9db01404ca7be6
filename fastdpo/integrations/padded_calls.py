"""The forms in which `fastdpo.score` takes rows, each made into the arguments of a call on padded rows, and the further
arguments that it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .. import checks
from ..models.batch import IMAGE_ARGUMENTS
from ..models.parts import input_device_of, modules_around, text_config
from ..packing import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OP = "score"

KNOWN = {"position_ids", "output_router_logits", "num_items_in_batch", *IMAGE_ARGUMENTS}
"""Arguments of a model that do not change what it returns, whether its class has them or not."""

OF_OUTPUT = {
    *("logits_to_keep", "num_logits_to_keep", "past_key_values", "use_cache"),
    *("output_hidden_states", "output_attentions", "return_dict"),
}
"""Arguments that change what a model returns."""

PEFT_ARGUMENTS = "special_peft_forward_args"
"""The attribute of a PeftModel that names the arguments of its hooks."""

OF_FLAT_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that say where the rows of a flat batch begin, by the names of transformers."""

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
    if cu_seqlens is None and attention_mask is None:
        cu_seqlens = _bounds_in(input_ids, kwargs)
    kwargs = {name: x for name, x in kwargs.items() if name not in OF_FLAT_ROWS}
    if not isinstance(input_ids, Tensor) or cu_seqlens is not None:
        checks.require(attention_mask is None, OP, "attention_mask", "be None for rows that are not padded", "a mask")
        lengths, device = None, input_device_of(base)
        if isinstance(input_ids, Tensor):
            lengths = _lengths(input_ids, cu_seqlens, kwargs.pop("position_ids", None))
        ids, targets = (_rows(x, given, lengths, device) for x, given in (("input_ids", input_ids), (name, labels)))
        checks.require(len(ids) > 0, OP, "input_ids", "have a row", "no rows")
        fit = [len(x) for x in ids] == [len(x) for x in targets]
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
    checks.require_tensors(OP, attention_mask=attention_mask)
    fits = attention_mask.dim() != 2 or list(attention_mask.shape) == shape
    checks.require(fits, OP, "attention_mask", "be {}", list(attention_mask.shape), shape)
    return {**kwargs, **batch, "attention_mask": attention_mask}


def require_arguments(model: nn.Module, kwargs: dict[str, Any], options: Collection[str]) -> None:
    """Requires that further arguments of a call are those of the model, and leave what it returns as it is.

    Args:
        model: the model, which may be wrapped.
        kwargs: the arguments.
        options: the arguments of `fastdpo.prepare`, which are not those of a call.
    """
    for name in OF_OUTPUT.intersection(kwargs):
        value = kwargs[name]
        is_default = value is None or (value is True if name == "return_dict" else value is False or value == 0)
        rule = "be left out, since score returns log-probabilities and nothing else"
        checks.require(is_default, OP, name, rule, checks.shown(value))
    if KNOWN.issuperset(kwargs):
        return
    known = {*KNOWN, *OF_OUTPUT, *OF_FLAT_ROWS}
    for module in modules_around(model):
        known |= {*inspect.signature(type(module).forward).parameters, *getattr(module, PEFT_ARGUMENTS, ())}
    for name in kwargs.keys() - known:
        rule = "be given to fastdpo.prepare" if name in options else "be an argument of score or of the model's forward"
        checks.require(False, OP, name, rule, checks.shown(kwargs[name]), error=TypeError)


def _bounds_in(ids: Rows, kwargs: dict[str, Any]) -> Tensor | None:
    """The bounds of the rows of a flat batch that a collator has said as transformers does: by name, or by positions
    that begin again. None if the batch has another form.
    """
    bounds, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if bounds is None and isinstance(ids, Tensor) and isinstance(positions, Tensor) and len(ids) == 1:
        begins = positions.flatten().diff() != 1
        if positions.numel() == ids.numel() and begins.any():
            bounds = F.pad(begins.nonzero()[:, 0] + 1, (1, 0))
            bounds = F.pad(bounds, (0, 1), value=ids.numel())
    return bounds


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
