"""The batches of ms-swift's templates, as padded rows.

A template pads the rows of a batch, or with `padding_free` and `packing` joins them into one row,
in which positions begin at zero with each of them. Either way the chosen rows come first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...packing import IGNORE_INDEX
from ...reasons import Reason
from ..scored_rows import Inputs

T = TypeVar("T")
_TAKEN = {"input_ids", "attention_mask", "labels", "position_ids"}
_DERIVED = {"text_position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
"""Entries that say again where the rows of a joined batch begin."""


def inputs_of(batch: dict[str, Any], *, padding_free: bool, router_logits: bool) -> Inputs | Reason:
    """Ids, mask and labels [R, L] of a batch, and options of the model call; or the reason why the
    batch is not supported.

    Args:
        batch: of a template.
        padding_free: whether the template joins rows.
        router_logits: whether the trainer needs the auxiliary loss of a router.
    """
    others = sorted(name for name, x in batch.items() if name not in _TAKEN | _DERIVED and x is not None)
    if others:
        return Reason("batch-entries", names=", ".join(others))
    if batch.get("input_ids") is None or batch.get("labels") is None:
        return Reason("no-batch-ids")
    rows = _joined(batch) if padding_free else _padded(batch)
    if isinstance(rows, Reason):
        return rows
    if (rows["labels"][:, 0] != IGNORE_INDEX).any():  # ms-swift then scores it by another row's last position
        return Reason("first-token")
    return {**rows, "use_cache": False, **({"output_router_logits": True} if router_logits else {})}


def _padded(batch: dict[str, Any]) -> Inputs | Reason:
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(mask, Tensor) or not isinstance(ids, Tensor):
        return Reason("no-batch-mask")
    rows = {"input_ids": ids, "attention_mask": mask, "labels": batch["labels"]}
    if positions is not None:
        counted = (mask.cumsum(1) - 1) * mask
        if positions.shape != ids.shape or not torch.equal(positions * mask, counted):
            return Reason("positions")
        if not mask[:, 0].all():  # those of the model's own may count padding
            rows["position_ids"] = positions
    return rows


def _joined(batch: dict[str, Any]) -> Inputs | Reason:
    positions = batch.get("text_position_ids")
    positions = batch.get("position_ids") if positions is None else positions
    ids, labels = batch["input_ids"], batch["labels"]
    if batch.get("attention_mask") is not None or positions is None or positions.shape != ids.shape or len(ids) != 1:
        return Reason("joined-rows")
    column = positions[0]  # [T]
    index = torch.arange(len(column), device=column.device)
    begins = column == 0
    row = begins.cumsum(0) - 1  # [T]
    if not begins[0] or not torch.equal(index - index[begins][row], column):
        return Reason("positions")

    def padded(x: Tensor, padding: int) -> Tensor:
        rows = x.new_full((int(row[-1]) + 1, int(column.max()) + 1), padding)
        rows[row, column] = x
        return rows

    return {
        "input_ids": padded(ids[0], 0),
        "attention_mask": padded(torch.ones_like(column), 0),
        "labels": padded(labels[0], IGNORE_INDEX),
    }


class OutputOfRows:
    """A function of a batch that returns the model's output for the same batch as padded rows.

    ms-swift's functions call it in place of the model. Some of them replace `__call__` of its class.

    Args:
        call: returns the output, with logits [R, L, V].
        inputs: the padded rows.
        padding_free: whether the batch joins its rows.
    """

    def __init__(self, call: Callable, inputs: Inputs, padding_free: bool):
        self._call, self._mask, self._padding_free = call, inputs["attention_mask"], padding_free

    def __call__(self, *, logits_to_keep: int | Tensor | None = None, **kwargs: Any) -> Any:
        output = self._call()
        logits = output.logits
        if self._padding_free:
            logits = logits[self._mask != 0][None]  # [1, T, V]
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        elif logits_to_keep is not None:
            logits = logits[:, -logits_to_keep:]
        output.logits = logits
        return output


def from_logits(stock: Callable[[Any], T], model: Any, inputs: Any, padding_free: bool = False) -> Callable[[Any], T]:
    """A stock function as `score` takes it, which is called with the model if no call was made, and otherwise with a
    function that returns the output of these padded rows. It gets the logits of the batch, with its rows joined if it
    has them so.
    """
    return lambda called: stock(called if called is model else OutputOfRows(called, inputs, padding_free))
