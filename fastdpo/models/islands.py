"""Attention masks of packed batches in which the tokens of an image see each other in both directions.

Such an image is an island of the layout: a row whose prefix ends where the row itself ends (see
`ops.packed_attention`). Which tokens those are is read from the mask that the model makes for the
padded batch. The mask is rebuilt from what was read, and must be equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..packing import Layout, NotPackable
from ..reasons import Reason
from .facts import attention_window
from .mixers import finding
from .parts import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLIDING = "sliding_attention"


def attention_masks(
    model: PreTrainedModel, layout: Layout, of_tokens: dict[str, Tensor], attention_mask: Tensor
) -> Tensor | dict[str, Tensor]:
    """The attention mask with which a switched model runs on packed tokens.

    Args:
        model: a model that is switched to packed attention.
        layout: of the batch.
        of_tokens: types of tokens, [R, L] each.
        attention_mask: [R, L], 0 at padding.

    Returns:
        `Layout.mask`, or one with islands, or one for each type of layer.

    Raises:
        NotPackable: the model's mask cannot be made, or no layout gives it.
    """
    make = getattr(type(model), "create_masks_for_generate", None)
    if make is None or not any(x.any() for x in of_tokens.values()):
        return layout.mask
    real = attention_mask != 0
    embeddings = torch.empty(*real.shape, 0, device=real.device)
    try:
        made = make(model.config, embeddings, real, None, None, **of_tokens)
    except Exception as error:  # models may want other arguments here
        raise NotPackable(Reason("image-mask", error=f"{type(error).__name__}: {error}")) from error
    if not isinstance(made, dict):
        return _with_islands(model, layout, _ahead(made, real, None))
    window = attention_window(text_config(model))
    return {
        kind: _with_islands(model, layout, _ahead(mask, real, window if kind == SLIDING else None))
        for kind, mask in made.items()
    }


def _ahead(mask: Any, real: Tensor, window: int | None) -> Tensor | None:
    """[R, L], how many tokens after itself each token sees; None if none sees any."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:  # causal, or made for an attention that is
        return None
    at = torch.arange(real.shape[1], device=real.device)
    visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0  # [R, L, L]
    last = torch.where(visible & real[:, None], at, -1).amax(-1).maximum(at)  # [R, L]
    rebuilt = (at <= last[..., None]) & real[:, None]
    if window is not None:
        rebuilt &= at > at[:, None] - window
    if ((visible != rebuilt) & real[..., None]).any():
        raise NotPackable(Reason("image-attention"))
    ahead = (last - at) * real
    return ahead if ahead.any() else None


def _with_islands(model: PreTrainedModel, layout: Layout, ahead: Tensor | None) -> Tensor:
    """int32 [1, 1, S, 4]: the rows of a layout, and each island as a row of its own."""
    if ahead is None:
        return layout.mask
    if finding.mixers_of(model):
        raise NotPackable(Reason("image-recurrence"))
    seen = layout.pack(ahead)[0].tolist()
    pieces = []
    for prefix, prefix_length, own, own_length in layout.rows.tolist():
        start, end = own, own + own_length
        if not any(seen[start:end]):
            pieces.append((prefix, prefix_length, own, own_length))
            continue
        if prefix_length:
            raise NotPackable(Reason("unshared-image"))
        while start < end:
            stop = start + seen[start] + 1 if seen[start] else next((i for i in range(start, end) if seen[i]), end)
            expected = range(seen[start], -1, -1) if seen[start] else [0] * (stop - start)
            if seen[start:stop] != list(expected):
                raise NotPackable(Reason("cut-image"))
            pieces.append((own, (stop if seen[start] else start) - own, start, stop - start))
            start = stop
    return torch.tensor(pieces, dtype=torch.int32, device="cpu")[None, None]
