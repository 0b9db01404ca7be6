"""Derivatives of the losses of pairs in closed form, for ops inside of which autograd does not run.

The symbols are those of `objectives`. With x = beta m, y = beta c and z = beta r:

    (log sigma)'(x) = sigma(-x)          sigma'(x) = sigma(x) sigma(-x)

Dimensions: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import sigmoid as sigma

from .divergences import DIVERGENCE_SLOPES, MAX_EXPONENT
from .objectives import MAX_SQUARED, LossInputs, PreferenceObjective, per_token, scores_per_token


def loss_slopes(pairs: LossInputs, objective: PreferenceObjective) -> tuple[Tensor, Tensor]:
    """Derivatives [P] of the losses of pairs by the chosen and the rejected log-probabilities, of losses that
    do not sort.

    `pairs.sft_logps` must be the chosen log-probabilities.
    """
    slope, alpha = DIVERGENCE_SLOPES[objective.f_divergence_type], objective.f_alpha_divergence_coef
    of_scores = slope(pairs.chosen_logratios, alpha), slope(pairs.rejected_logratios, alpha)
    totals = [torch.zeros_like(pairs.chosen_logps) for _ in range(2)]
    for loss, weight in objective.weighted_losses:
        if loss == "sft":
            tokens = pairs.chosen_lengths.sum().clamp(min=1)  # pyright: ignore[reportOptionalMemberAccess]
            totals[0] -= weight * len(pairs.chosen_logps) / tokens
            continue
        for total, by_score, of_score in zip(totals, _by_scores(loss, pairs, objective), of_scores, strict=True):
            total += weight * by_score * of_score
    return totals[0], totals[1]


def _by_scores(loss: str, pairs: LossInputs, objective: PreferenceObjective) -> tuple[Tensor, Tensor]:
    """Derivatives by f(c) and f(r)."""
    beta, target = objective.beta, 1 / (2 * objective.beta)
    if loss in OF_MARGINS:
        slope = beta * OF_MARGINS[loss](beta * pairs.margins, objective)
        return slope, -slope
    if loss in OF_LOGRATIOS:
        by_chosen, by_rejected = OF_LOGRATIOS[loss](beta * pairs.chosen_logratios, beta * pairs.rejected_logratios)
        return beta * by_chosen, beta * by_rejected
    if loss == "sppo_hard":
        return 2 * (pairs.chosen_logratios - target), 2 * (pairs.rejected_logratios + target)
    if loss == "ipo_sum":
        slope = 2 * (pairs.margins.clamp(-MAX_SQUARED, MAX_SQUARED) - target) * _is_bounded(pairs.margins)
        return slope, -slope
    if loss == "simpo_sum":
        x = beta * (pairs.chosen_logps - pairs.rejected_logps) - objective.simpo_gamma
        slope = beta * _smoothed(x, objective)
        return slope, -slope
    if loss == "simpo":
        chosen, rejected = per_token(loss, pairs, pairs.chosen_logps, pairs.rejected_logps)
        slope = beta * _smoothed(beta * (chosen - rejected) - objective.simpo_gamma, objective)
        return per_token(loss, pairs, slope, -slope)
    chosen, rejected = scores_per_token(loss, pairs)
    if loss == "sigmoid_norm":
        slope = -beta * sigma(-beta * (chosen - rejected))
        return per_token(loss, pairs, slope, -slope)
    bounded = [x.clamp(-MAX_SQUARED, MAX_SQUARED) for x in (chosen, rejected)]
    slope = 2 * (bounded[0] - bounded[1] - target)  # ipo
    return per_token(loss, pairs, slope * _is_bounded(chosen), -slope * _is_bounded(rejected))


def _is_bounded(scores: Tensor) -> Tensor:
    return scores.abs() <= MAX_SQUARED


def _smoothed(x: Tensor, objective: PreferenceObjective) -> Tensor:
    eps = objective.label_smoothing
    return eps * sigma(x) - (1 - eps) * sigma(-x)


def _exo_pair(x: Tensor, objective: PreferenceObjective) -> Tensor:
    eps = objective.label_smoothing
    return _of_logistic(x) * (x - math.log1p(-eps) + math.log(eps))


def _robust(x: Tensor, objective: PreferenceObjective) -> Tensor:
    eps = objective.label_smoothing
    return -((1 - eps) * sigma(-x) + eps * sigma(x)) / (1 - 2 * eps)


def _discopop(x: Tensor, objective: PreferenceObjective) -> Tensor:
    gate, tau = x / objective.discopop_tau, objective.discopop_tau
    exponent = F.logsigmoid(gate) - x
    of_exponential = exponent.clamp(max=MAX_EXPONENT).exp() * (sigma(-gate) / tau - 1) * (exponent <= MAX_EXPONENT)
    return of_exponential + _of_logistic(gate) / tau * F.logsigmoid(x) - sigma(-gate) * sigma(-x)


def _of_logistic(x: Tensor) -> Tensor:
    return sigma(x) * sigma(-x)


OF_MARGINS: dict[str, Callable[[Tensor, PreferenceObjective], Tensor]] = {
    "sigmoid": lambda x, _: -sigma(-x),
    "hinge": lambda x, _: -(x < 1).to(x.dtype),
    "exo_pair": _exo_pair,
    "robust": _robust,
    "discopop": _discopop,
    "cdpo": _smoothed,
}
"""By loss, the derivative by x."""

OF_LOGRATIOS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "nca_pair": lambda y, z: (0.5 * sigma(y) - sigma(-y), 0.5 * sigma(z)),
    "bco_pair": lambda y, z: (-sigma(-y), sigma(z)),
    "apo_zero": lambda y, z: (-_of_logistic(y), _of_logistic(z)),
    "apo_down": lambda y, z: (_of_logistic(y) - _of_logistic(y - z), _of_logistic(y - z)),
}
"""By loss, the derivatives by y and z."""
