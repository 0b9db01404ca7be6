"""The definition of every op: eager PyTorch for any dtype and device, a few lines each.

The tests compare each op with these definitions: in float64 they are the exact values, and in the
op's dtype they give the error of plain PyTorch. They are neither fast nor memory-efficient, and the
library calls them only to check itself.

Dimensions: N scored tokens, V vocabulary, D hidden size, T packed tokens, H query heads, H_kv key
heads, D_v head size of values, S sequences, B padded rows of length L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..packing import IGNORE_INDEX
from .head.results import SequenceLogps, TokenLogps
from .losses.preference_loss import DPO, PreferenceLoss, PreferenceObjective, preference_loss
from .losses.results import LinearPreferenceLoss


def token_logps(
    logits: Tensor,  # [..., V]
    targets: Tensor,  # [...]
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logps",),
) -> TokenLogps:
    """`log softmax(z)[target]` of transformed logits z.

    `z = softcap * tanh(logit_scale * logits / softcap) / temperature`
    """
    z = (logits if logits.dtype == torch.float64 else logits.float()) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = (z / temperature).log_softmax(-1)  # [..., V]
    scored = targets != IGNORE_INDEX
    index = targets.clamp(min=0)[..., None]

    def if_requested(name: str, define: Callable[[], Tensor]) -> Tensor | None:
        if name not in outputs:
            return None
        value = define()
        return torch.where(scored, value, torch.zeros_like(value))

    return TokenLogps(
        logps=torch.where(scored, logp.gather(-1, index)[..., 0], 0.0),
        entropy=if_requested("entropy", lambda: torch.special.entr(logp.exp()).sum(-1)),
        mean_logits=if_requested("mean_logits", lambda: (z / temperature).mean(-1).detach()),
        is_top1=if_requested("is_top1", lambda: z.argmax(-1) == targets),
        log_sum_sq_probs=if_requested("log_sum_sq_probs", lambda: (2 * logp).logsumexp(-1).detach()),
    )


def linear_logps(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    targets: Tensor,  # [N]
    *,
    bias: Tensor | None = None,  # [V]
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logps",),
) -> TokenLogps:
    """`token_logps` of the head's logits `hidden @ weight.T + bias`."""
    logits = F.linear(hidden, weight, bias)  # [N, V]
    return token_logps(
        logits, targets, softcap=softcap, logit_scale=logit_scale, temperature=temperature, outputs=outputs
    )


def sequence_logps(
    logits: Tensor,  # [T, V], or [B, L, V] without cu_seqlens
    targets: Tensor,  # [T], or [B, L] without cu_seqlens
    cu_seqlens: Tensor | None = None,  # [S + 1]
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> SequenceLogps:
    """Sums of `token_logps` over each sequence, and the number of its targets that are not -100."""
    logps = token_logps(logits, targets, softcap=softcap, logit_scale=logit_scale, temperature=temperature).logps
    if cu_seqlens is None:
        return SequenceLogps(logps.sum(-1), (targets != IGNORE_INDEX).sum(-1))
    bounds = cu_seqlens.tolist()
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    return SequenceLogps(
        torch.stack([logps[span].sum() for span in spans]),
        torch.stack([(targets[span] != IGNORE_INDEX).sum() for span in spans]),
    )


def linear_sequence_logps(
    hidden: Tensor,  # [T, D]
    weight: Tensor,  # [V, D]
    targets: Tensor,  # [T]
    cu_seqlens: Tensor,  # [S + 1]
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> SequenceLogps:
    """`sequence_logps` of the head's logits."""
    logits = F.linear(hidden, weight, bias)
    return sequence_logps(
        logits, targets, cu_seqlens, softcap=softcap, logit_scale=logit_scale, temperature=temperature
    )


def linear_preference_loss(
    hidden: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    targets: Tensor,  # [N]
    cu_seqlens: Tensor,  # [2P + 1]
    ref_chosen_logps: Tensor,  # [P]
    ref_rejected_logps: Tensor,  # [P]
    objective: PreferenceObjective = DPO,
    *,
    weights: Tensor | None = None,  # [P]
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Sequence[str] = ("logps",),
) -> LinearPreferenceLoss:
    """`preference_loss` of the sums of the head's log-probabilities over each completion."""
    logits = F.linear(hidden, weight, bias)
    transform = dict(softcap=softcap, logit_scale=logit_scale, temperature=temperature)
    tokens = token_logps(logits, targets, outputs=outputs, **transform)  # pyright: ignore[reportArgumentType]
    sums = sequence_logps(logits, targets, cu_seqlens, **transform)  # pyright: ignore[reportArgumentType]
    chosen, rejected = sums.logps.chunk(2)
    chosen_lengths, rejected_lengths = sums.lengths.chunk(2)
    lengths = dict(chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
    loss, *pairs = preference_loss(
        chosen, rejected, ref_chosen_logps, ref_rejected_logps, objective, **lengths, weights=weights
    )
    pairs, chosen, rejected, tokens = tree_map_only(Tensor, Tensor.detach, (pairs, chosen, rejected, tokens))
    return LinearPreferenceLoss(PreferenceLoss(loss, *pairs), chosen, rejected, tokens)


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
    visible = torch.zeros(query.shape[0], key.shape[0], dtype=torch.bool, device=query.device)  # [T, T]
    paths: list[list[int]] = []  # of each token, those from the first of its row to itself
    for prefix, prefix_length, own, own_length in rows.tolist():
        end = own + own_length
        is_island = prefix + prefix_length == end
        before = own - prefix if is_island else prefix_length
        seen = [*(paths[prefix + before - 1] if before else ()), *range(own, end)]
        paths += [seen[: before + i + 1] for i in range(own_length)]
        position = torch.arange(len(seen), device=query.device)
        distance = position[before:, None] - position  # [own_length, len(seen)]
        in_window = distance < (len(seen) if window is None else window)
        visible[own:end, seen] = ((distance >= 0) | is_island) & in_window
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)
