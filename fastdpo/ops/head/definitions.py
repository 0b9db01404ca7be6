"""The definitions of `token_logps` and `linear_logps` (see `ops.definitions`).

Dimensions: N scored tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...packing import IGNORE_INDEX
from .results import TokenLogps

LEAST_LOGP = -1e4
"""Below it, a probability is 0 in any dtype. Its product with -inf would be NaN, as would that of its gradient."""


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
        entropy=if_requested("entropy", lambda: -(logp.exp() * logp.clamp(min=LEAST_LOGP)).sum(-1)),
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
