"""The definition of `packed_attention` (see `ops.definitions`).

Dimensions: T packed tokens, H query heads, H_kv key heads, D and D_v head sizes, S rows of the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_attention(
    query: Tensor,  # [T, H, D]
    key: Tensor,  # [T, H_kv, D]
    value: Tensor,  # [T, H_kv, D_v]
    rows: Tensor,  # [S, 4]: prefix start, prefix length, own start, own length
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:  # [T, H, D_v]
    """Softmax attention in which a row's own tokens see the row's prefix and, causally, themselves.

    The prefix of a row is the token `prefix start + prefix length - 1` and what this token sees. A
    row's positions start at 0, run through its prefix and continue through its own tokens. A query
    at position p sees the keys at positions k with p - window < k <= p. In a row whose prefix ends
    where the row itself ends, it also sees the row's own keys at k > p. Scores are `scale * q.k`,
    or `softcap * tanh(scale * q.k / softcap)`. The sink of a head is one more score in its softmax,
    without a value.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    paths: list[list[int]] = []  # of each token, those from the first of its row to itself
    outputs = [query.new_empty(0, query.shape[1], value.shape[2])]
    for prefix, prefix_length, own, own_length in rows.tolist():
        end = own + own_length
        is_island = prefix + prefix_length == end
        before = own - prefix if is_island else prefix_length
        seen = [*(paths[prefix + before - 1] if before else ()), *range(own, end)]
        paths += [seen[: before + i + 1] for i in range(own_length)]
        position = torch.arange(len(seen), device=query.device)
        distance = position[before:, None] - position  # [own_length, len(seen)]
        in_window = distance < (len(seen) if window is None else window)
        scores = torch.einsum("qhd,khd->hqk", query[own:end], key[seen])  # [H, own_length, len(seen)]
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~(((distance >= 0) | is_island) & in_window), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, own_length, 1)], -1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(seen)], value[seen]))
    return torch.cat(outputs)
