"""The definitions of the ops over sequences and pairs (see `ops.definitions`).

Dimensions: N scored tokens, V vocabulary, D hidden size, T packed tokens, S sequences, P pairs, B padded rows of
length L.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...packing import IGNORE_INDEX
from ..head.definitions import token_logps
from ..head.results import SequenceLogps
from .linear_preference_loss import LinearPreferenceLoss
from .objectives import DPO, PreferenceObjective
from .preference_loss import PreferenceLoss, preference_loss


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
