"""The loss of preference pairs from log-probabilities [P].

Dimensions: P pairs.
"""

from __future__ import annotations

from functools import reduce
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import checks
from ..devices import accumulation_dtype, is_host, is_traced
from .divergences import DIVERGENCES
from .objectives import (
    DPO,
    LOSSES,
    OP,
    REFERENCE_FREE,
    SORTED,
    LossInputs,
    PreferenceObjective,
    per_token,
)


class PreferenceLoss(NamedTuple):
    """Result of `preference_loss`, in float32 (float64 if any input is float64).

    Attributes:
        loss: mean of `losses`, a scalar. Differentiable.
        losses: [P] weighted sum of the losses of `loss_type`. Those of `aot` and `aot_unpaired` are
            in sorted order instead of the order of the pairs. Differentiable.
        chosen_rewards: [P] `beta * (chosen_logps - ref_chosen_logps)`, independent of the
            divergence. Without a reference, `beta * chosen_logps`, for simpo per token. No gradient.
        rejected_rewards: [P] the same for the rejected completions. No gradient.
    """

    loss: Tensor
    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def preference_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None = None,
    ref_rejected_logps: Tensor | None = None,
    objective: PreferenceObjective = DPO,
    *,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    sft_logps: Tensor | None = None,
    weights: Tensor | None = None,
) -> PreferenceLoss:
    """Loss of a batch of preference pairs. Losses of TRL 1.16's DPOTrainer equal those up to rounding.

    Plain PyTorch in float32 (float64 if any input is float64), without synchronization with the
    host.

    The loss stays finite where TRL's overflows in float32: exponents of forward_kl and discopop are
    bounded by 80, as TRL bounds those of alpha_divergence, and the scores per token that ipo
    squares are bounded by 1e17. Beyond these bounds the gradient is zero. With tau below 1,
    discopop does not reach its bound.

    Args:
        chosen_logps: [P] summed log-probabilities of the chosen completions, in nats; float16,
            bfloat16, float32 or float64. For example from `sequence_logps`.
        rejected_logps: [P] the same for the rejected completions.
        ref_chosen_logps, ref_rejected_logps: [P] the same under the reference model. They receive
            no gradient. May be None for simpo, simpo_sum and sft, which have no reference.
        objective: the loss and its constants. Default: DPO with beta 0.1.
        chosen_lengths, rejected_lengths: [P] numbers of completion tokens. Required by ipo, simpo and
            sigmoid_norm; sft requires `chosen_lengths`.
        sft_logps: [P] log-probabilities for sft in place of `chosen_logps`. Pass the plain sums
            here if `chosen_logps` are weighted sums, as in LD-DPO (arXiv 2409.06411).
        weights: [P] factors of the pairs' losses, for example those of WPO (arXiv 2406.11827), detached.
            Must be None for aot and aot_unpaired, which sort.

    Returns:
        `PreferenceLoss`.

    Raises:
        ValueError: a shape, device or value breaks a rule above, or the objective needs an argument
            that is None; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    logps = dict(
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
    )
    floating = {**logps, "sft_logps": sft_logps, "weights": weights}
    lengths = dict(chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
    given = {**floating, **lengths}
    is_objective = isinstance(objective, PreferenceObjective)
    rule = 'be a PreferenceObjective, such as PreferenceObjective(loss_type="ipo")'
    checks.require(is_objective, OP, "objective", rule, checks.shown(objective), error=TypeError)
    is_free = all(loss in REFERENCE_FREE for loss in objective.losses)
    without = is_free and ref_chosen_logps is None and ref_rejected_logps is None
    required: dict[str, Any] = {name: x for name, x in logps.items() if not (without and name.startswith("ref_"))}
    checks.require_tensors(OP, **required)
    checks.require_tensors_or_none(OP, **given)
    checks.require_floating(OP, **floating)
    for name, x in lengths.items():
        is_number = x is None or not (x.dtype.is_complex or x.dtype == torch.bool)
        checks.require(is_number, OP, name, "be int or floating point", x if x is None else x.dtype, error=TypeError)
    for name, x in required.items():
        checks.require(x.dim() == 1 and len(x) > 0, OP, name, "be [P], P > 0", list(x.shape))
    n_pairs = checks.agreed(*map(len, required.values()))
    for name, x in given.items():
        if x is not None:
            checks.require(tuple(x.shape) == (n_pairs,), OP, name, "be [{}]", list(x.shape), n_pairs)
    checks.require_same_device(OP, **given)
    if is_host(chosen_logps.device) and not is_traced():  # elsewhere it would synchronize
        for name, x in lengths.items():
            checks.require(x is None or bool((x >= 0).all()), OP, name, "be 0 or more", "a negative or NaN length")
    unsorted = weights is None or not any(loss in SORTED for loss in objective.losses)
    checks.require(unsorted, OP, "weights", f"be None with {' and '.join(SORTED)}, which sort", "weights of pairs")

    # float32, or float64 if any input is
    dtype = reduce(torch.promote_types, (accumulation_dtype(x.dtype) for x in floating.values() if x is not None))
    chosen, rejected = chosen_logps.to(dtype), rejected_logps.to(dtype)
    references = ref_chosen_logps, ref_rejected_logps
    ref_chosen, ref_rejected = (torch.zeros_like(chosen) if x is None else x.detach().to(dtype) for x in references)
    score, alpha = DIVERGENCES[objective.f_divergence_type], objective.f_alpha_divergence_coef
    scores = score(chosen - ref_chosen, alpha), score(rejected - ref_rejected, alpha)
    sft_logps = chosen if sft_logps is None else sft_logps.to(dtype)
    pairs = LossInputs(chosen, rejected, ref_chosen, ref_rejected, *scores, sft_logps, *lengths.values())
    of_losses = zip(objective.losses, objective.loss_weights or repeat(1.0), strict=False)
    losses = torch.stack([weight * LOSSES[loss](pairs, objective) for loss, weight in of_losses]).sum(0)
    if weights is not None:
        losses = losses * weights.to(dtype)
    rewards = pairs.chosen_logratios, pairs.rejected_logratios
    if without and "simpo" in objective.losses:
        rewards = per_token("simpo", pairs, *rewards)
    chosen_rewards, rejected_rewards = (objective.beta * x.detach() for x in rewards)
    return PreferenceLoss(losses.mean(), losses, chosen_rewards, rejected_rewards)
