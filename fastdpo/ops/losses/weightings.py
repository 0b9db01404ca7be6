"""Weights of tokens and of pairs: LD-DPO and WPO.

Dimensions: P pairs, L positions of a padded row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ..devices import accumulation_dtype


def length_desensitized_logps(logps: Tensor, mask: Tensor, ld_alpha: float) -> Tensor:
    """Length-desensitized sums of log-probabilities for LD-DPO (arXiv 2409.06411).

    Tokens of a completion beyond the length of its pair's shorter completion are weighted by
    `ld_alpha`. Use these sums for the policy and for the reference.

    Args:
        logps: [2P, L] floating point, log-probabilities of tokens in nats. Rows i and P + i are the
            chosen and the rejected completion of pair i.
        mask: [2P, L] bool or numbers, nonzero where a completion token is scored.
        ld_alpha: weight of the tokens beyond the shorter length, in [0, 1]; 1 gives the plain sum.

    Returns:
        [2P] float32 (float64 for float64 inputs): `chosen_logps`, then `rejected_logps`.
        Differentiable.

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    op = "length_desensitized_logps"
    checks.require_tensors(op, logps=logps, mask=mask)
    checks.require_floating(op, logps=logps)
    checks.require_real(op, mask=mask)
    _require_pair_rows(op, logps, mask=mask)
    checks.require_number(op, "ld_alpha", ld_alpha, "lie in [0, 1]")
    checks.require(0 <= ld_alpha <= 1, op, "ld_alpha", "lie in [0, 1]", ld_alpha)
    scored = mask.bool()
    logps = logps.to(accumulation_dtype(logps.dtype)).masked_fill(~scored, 0)  # [2P, L]
    shorter = scored.sum(1).view(2, len(logps) // 2).amin(0).repeat(2)  # [2P]
    return torch.where(scored.cumsum(1) <= shorter[:, None], logps, ld_alpha * logps).sum(1)


def wpo_weights(logps: Tensor, log_sum_sq_probs: Tensor, mask: Tensor) -> Tensor:
    """Weights `w(chosen) * w(rejected)` of WPO: how likely the policy is to generate a pair.

    `w = exp(mean_t(log p_t(y_t) - log sum_v p_t(v)^2))` over the tokens t of a completion (arXiv
    2406.11827, eq. 2). As in TRL, weights are not bounded by 1: a token may be more likely than the
    policy's average sample.

    Args:
        logps: [2P, L] floating point, log-probabilities of tokens in nats. Rows i and P + i are the
            chosen and the rejected completion of pair i.
        log_sum_sq_probs: [2P, L] floating point, the field of `TokenLogps`.
        mask: [2P, L] bool or numbers, nonzero where a completion token is scored.

    Returns:
        [P] float32 (float64 for float64 inputs). No gradient.

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    op = "wpo_weights"
    checks.require_tensors(op, logps=logps, log_sum_sq_probs=log_sum_sq_probs, mask=mask)
    checks.require_floating(op, logps=logps, log_sum_sq_probs=log_sum_sq_probs)
    checks.require_real(op, mask=mask)
    _require_pair_rows(op, logps, log_sum_sq_probs=log_sum_sq_probs, mask=mask)
    scored = mask.bool()
    dtype = accumulation_dtype(logps.dtype)
    log_ratios = (logps.detach().to(dtype) - log_sum_sq_probs.detach().to(dtype)).masked_fill(~scored, 0)  # [2P, L]
    means = log_ratios.sum(1) / scored.sum(1).clamp(min=1)  # [2P]
    return means.view(2, len(logps) // 2).sum(0).exp()


def _require_pair_rows(op: str, logps: Tensor, **others: Tensor) -> None:
    paired = logps.dim() == 2 and logps.shape[0] % 2 == 0
    checks.require(paired, op, "logps", "be [2P, L]", list(logps.shape))
    for name, x in others.items():
        checks.require(x.shape == logps.shape, op, name, "have shape {}", list(x.shape), list(logps.shape))
    checks.require_same_device(op, logps=logps, **others)
