"""The rows of several batches in one, such as for one call of a model in which they share their prompts."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import forward, sharding, support
from ..models.parts import base_of
from ..packing import IGNORE_INDEX
from .scored_rows import ScoredRows


def equal_when_merged(model: nn.Module, a: Tensor, b: Tensor) -> bool:
    """Whether one fused call for the rows of two batches has the results of one for each batch.

    Args:
        model: the model, which may be wrapped.
        a: tokens [R, L] of one batch.
        b: those of the other, [R2, L2].
    """
    base = base_of(model, "equal_when_merged")
    if not forward.is_fused(base) or (base.training and support.has_dropout(base)):
        return False
    if support.rope_limit(base) is None:
        return True
    if sharding.is_sharded(base):  # ranks that run it together must agree, and see other widths
        return False
    widths = a.shape[1], b.shape[1]
    return widths[0] == widths[1] or support.rope_reason(base, max(widths)) is None


def merged(*batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of batches, one batch below the other, padded on the right to the widest.

    Args:
        batches: their rows by name, such as "input_ids" and "labels", [R, L] each, or [R]. All have the names of the
            first one.
    """

    def of(name: str) -> Tensor:
        tensors = [batch[name] for batch in batches]
        if tensors[0].ndim == 1:
            return torch.cat(tensors)
        width = max(x.shape[1] for x in tensors)
        padding = IGNORE_INDEX if name == "labels" else 0
        return torch.cat([F.pad(x, (0, width - x.shape[1]), value=padding) for x in tensors])

    return {name: of(name) for name in batches[0]}


def parts_of(output: Any, a: Tensor, b: Tensor) -> list[Any]:
    """The output of a model for `merged` rows, as one for each of the two batches: `ScoredRows`, or one with
    `logits` if the call fell back.

    Args:
        output: of the model.
        a, b: tokens of the batches, [R, L] and [R2, L2].
    """
    parts, start = [], 0
    for rows, width in (a.shape, b.shape):
        part = slice(start, start := start + rows)
        if isinstance(output, ScoredRows):
            parts.append(output.rows(part, width - 1))
        else:
            parts.append(SimpleNamespace(logits=output.logits[part, :width]))
    return parts
