"""The definitions of the ops over sequences (see `ops.definitions`).

Dimensions: V vocabulary, D hidden size, T packed tokens, S sequences, B padded rows of length L.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ...packing import IGNORE_INDEX
from ..head.definitions import token_logps
from ..head.results import SequenceLogps


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
