"""The loss of preference pairs from hidden states and the head's weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import checks
from .objectives import DPO, PreferenceObjective
from .preference_loss import PreferenceLoss, preference_loss
from .sequence_logps import linear_sequence_logps

OP = "linear_preference_loss"


def linear_preference_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    cu_seqlens: Tensor,
    ref_chosen_logps: Tensor | None = None,
    ref_rejected_logps: Tensor | None = None,
    objective: PreferenceObjective = DPO,
    *,
    weights: Tensor | None = None,
    **head: Any,
) -> PreferenceLoss:
    """Loss of preference pairs from hidden states and the head's weight.

    `preference_loss` of the sums of `linear_sequence_logps`, whose cost and memory it has.

    Args:
        hidden: [N, D] float16, bfloat16, float32 or float64: the states that predict the targets.
            `hidden[layout.label_index]` for packed states of a `Layout`.
        weight: [V, D], as in `linear_logps`.
        targets: [N] int32 or int64 ids, -100 where nothing is scored; `layout.labels`.
        cu_seqlens: int32 or int64 [2P + 1], the start of each completion, and N: the P chosen ones,
            then the rejected ones in the same order; `layout.label_bounds`. On any device.
        ref_chosen_logps, ref_rejected_logps, objective, weights: as in `preference_loss`.
        head: bias, softcap, logit_scale, temperature and memory_budget, as in `linear_logps`.

    Returns:
        `PreferenceLoss`.

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    checks.require_tensors(OP, hidden=hidden, weight=weight, targets=targets, cu_seqlens=cu_seqlens)
    checks.require_values(OP, cu_seqlens=cu_seqlens)
    even = cu_seqlens.dim() == 1 and cu_seqlens.shape[0] % 2 == 1 and cu_seqlens.shape[0] > 1
    checks.require(even, OP, "cu_seqlens", "be [2P + 1], P > 0", list(cu_seqlens.shape))
    logps, lengths = linear_sequence_logps(hidden, weight, targets, cu_seqlens.to(targets.device), **head)
    (chosen, rejected), (of_chosen, of_rejected) = logps.chunk(2), lengths.chunk(2)
    counts = dict(chosen_lengths=of_chosen, rejected_lengths=of_rejected)
    return preference_loss(chosen, rejected, ref_chosen_logps, ref_rejected_logps, objective, weights=weights, **counts)
