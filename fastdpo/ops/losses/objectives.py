"""The losses of TRL 1.16's DPOTrainer, those of other trainers, and their constants.

Symbols in the formulas:

    c, r          log-ratios log(policy / reference) of a pair's chosen and rejected completion
    f(c), f(r)    their scores; with reverse_kl, f(c) = c
    m             f(c) - f(r)
    |c|, |r|      numbers of completion tokens
    sigma         logistic function
    eps           label smoothing

Dimensions: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks
from .divergences import DIVERGENCES, MAX_EXPONENT

OP = "preference_loss"

MAX_SQUARED = 1e17
"""Bound of the absolute scores per token before they are squared, which leaves room for sums over pairs."""


class LossInputs(NamedTuple):
    """The inputs of a loss, [P] each. All have one dtype except the lengths."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    ref_chosen_logps: Tensor
    ref_rejected_logps: Tensor
    chosen_scores: Tensor
    rejected_scores: Tensor
    sft_logps: Tensor
    chosen_lengths: Tensor | None
    rejected_lengths: Tensor | None

    @property
    def chosen_logratios(self) -> Tensor:
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected_logratios(self) -> Tensor:
        return self.rejected_logps - self.ref_rejected_logps

    @property
    def margins(self) -> Tensor:
        return self.chosen_scores - self.rejected_scores


def per_token(loss: str, pairs: LossInputs, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Values [P] of the completions, divided by their lengths."""
    of_chosen = _given(loss, "chosen_lengths", pairs.chosen_lengths).clamp(min=1)
    of_rejected = _given(loss, "rejected_lengths", pairs.rejected_lengths).clamp(min=1)
    return chosen / of_chosen, rejected / of_rejected


def scores_per_token(loss: str, pairs: LossInputs) -> tuple[Tensor, Tensor]:
    return per_token(loss, pairs, pairs.chosen_scores, pairs.rejected_scores)


def _smoothed(x: Tensor, eps: float) -> Tensor:
    """`-(1 - eps) log sigma(x) - eps log sigma(-x)`."""
    return -(1 - eps) * F.logsigmoid(x) - eps * F.logsigmoid(-x)


def _given(loss: str, argument: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(f"{OP}: {argument} must be given for the loss {loss}; got None")
    return value


def _logistic(x: Tensor) -> Tensor:
    """`sigma(x)`, with the gradient `sigma(x) sigma(-x)` for every x.

    That of `torch.sigmoid`, `y (1 - y)`, vanishes where y rounds to 1.
    """
    return torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))


def _sigmoid(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`-log sigma(beta m)`. DPO, arXiv 2305.18290, eq. 7."""
    return -F.logsigmoid(objective.beta * pairs.margins)


def _hinge(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`max(0, 1 - beta m)`.

    The hinge loss of SLiC-HF (arXiv 2305.10425) on log-ratios, as in RSO (arXiv 2309.06657).
    """
    return torch.relu(1 - objective.beta * pairs.margins)


def _ipo(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`(f(c) / |c| - f(r) / |r| - 1 / (2 beta))^2`.

    IPO, arXiv 2310.12036, eq. 17, with scores per token.
    """
    chosen, rejected = (x.clamp(-MAX_SQUARED, MAX_SQUARED) for x in scores_per_token("ipo", pairs))
    return (chosen - rejected - 1 / (2 * objective.beta)) ** 2


def _exo_pair(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`KL(p || q)` with `p = (sigma(beta m), sigma(-beta m))` and `q = (1 - eps, eps)`.

    EXO, arXiv 2402.00856, eq. 16.
    """
    x, eps = objective.beta * pairs.margins, objective.label_smoothing
    of_chosen = _logistic(x) * (F.logsigmoid(x) - math.log1p(-eps))
    of_rejected = _logistic(-x) * (F.logsigmoid(-x) - math.log(eps))
    return of_chosen + of_rejected


def _nca_pair(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`-log sigma(beta c) - (log sigma(-beta c) + log sigma(-beta r)) / 2`.

    NCA, arXiv 2402.05369, section 4.1.
    """
    chosen, rejected = objective.beta * pairs.chosen_logratios, objective.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`(-(1 - eps) log sigma(beta m) + eps log sigma(-beta m)) / (1 - 2 eps)`.

    rDPO, arXiv 2403.00409, section 3.1.
    """
    x, eps = objective.beta * pairs.margins, objective.label_smoothing
    return (-(1 - eps) * F.logsigmoid(x) + eps * F.logsigmoid(-x)) / (1 - 2 * eps)


def _bco_pair(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`-log sigma(beta c) - log sigma(-beta r)`.

    BCO, arXiv 2404.04656, section 4, without its reward shift.
    """
    chosen, rejected = objective.beta * pairs.chosen_logratios, objective.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo_hard(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2`.

    SPPO, arXiv 2405.00675, eq. 4.7 with hard preferences.
    """
    target = 0.5 / objective.beta
    return (pairs.chosen_logratios - target) ** 2 + (pairs.rejected_logratios + target) ** 2


def _aot(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`_smoothed(beta (sort(policy) - sort(reference)))` of the log-ratios of chosen to rejected.

    AOT for paired data, arXiv 2406.05882, section 3.
    """
    policy = (pairs.chosen_logps - pairs.rejected_logps).sort().values
    reference = (pairs.ref_chosen_logps - pairs.ref_rejected_logps).sort().values
    return _smoothed(objective.beta * (policy - reference), objective.label_smoothing)


def _aot_unpaired(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`_smoothed(beta (sort(c) - sort(r)))`. AOT for unpaired data, arXiv 2406.05882, section 3."""
    chosen, rejected = pairs.chosen_logratios.sort().values, pairs.rejected_logratios.sort().values
    return _smoothed(objective.beta * (chosen - rejected), objective.label_smoothing)


def _apo_zero(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`1 - sigma(beta c) + sigma(beta r)`. APO, arXiv 2408.06266, eq. 7."""
    chosen, rejected = objective.beta * pairs.chosen_logratios, objective.beta * pairs.rejected_logratios
    return _logistic(-chosen) + _logistic(rejected)


def _apo_down(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`sigma(beta c) + 1 - sigma(beta (c - r))`. APO, arXiv 2408.06266, eq. 8."""
    chosen, rejected = objective.beta * pairs.chosen_logratios, objective.beta * pairs.rejected_logratios
    return _logistic(chosen) + _logistic(rejected - chosen)


def _discopop(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`-(1 - g) log sigma(beta m) + g exp(-beta m)` with `g = sigma(beta m / tau)`.

    DiscoPOP, arXiv 2406.08414, eq. 5. The code adds log g to the exponent, so that the product does
    not overflow: with tau below 1, g falls faster than `exp(-beta m)` rises.
    """
    x = objective.beta * pairs.margins
    gate = x / objective.discopop_tau
    exponential = (F.logsigmoid(gate) - x).clamp(max=MAX_EXPONENT).exp()
    return exponential - _logistic(-gate) * F.logsigmoid(x)


def _sft(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`-log policy` of the chosen completion.

    Scaled so that its mean over pairs is the mean over all chosen tokens.
    """
    tokens = _given("sft", "chosen_lengths", pairs.chosen_lengths).sum().clamp(min=1)
    return -pairs.sft_logps * len(pairs.sft_logps) / tokens


def _sigmoid_norm(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`-log sigma(beta (f(c) / |c| - f(r) / |r|))`.

    Length-normalized DPO of Tulu 3, arXiv 2411.15124.
    """
    chosen, rejected = scores_per_token("sigmoid_norm", pairs)
    return -F.logsigmoid(objective.beta * (chosen - rejected))


def _cdpo(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`_smoothed(beta m)`, DPO where a preference is wrong with the probability eps.

    Conservative DPO, https://ericmitchell.ai/cdpo.pdf, eq. 3.
    """
    return _smoothed(objective.beta * pairs.margins, objective.label_smoothing)


def _ipo_sum(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`(m - 1 / (2 beta))^2`. IPO, arXiv 2310.12036, eq. 17, with scores of whole completions."""
    return (pairs.margins.clamp(-MAX_SQUARED, MAX_SQUARED) - 1 / (2 * objective.beta)) ** 2


def _simpo(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`_smoothed(beta (log policy(c) / |c| - log policy(r) / |r|) - gamma)`, without a reference.

    SimPO, arXiv 2405.14734, eq. 6, which has no smoothing.
    """
    chosen, rejected = per_token("simpo", pairs, pairs.chosen_logps, pairs.rejected_logps)
    return _smoothed(objective.beta * (chosen - rejected) - objective.simpo_gamma, objective.label_smoothing)


def _simpo_sum(pairs: LossInputs, objective: PreferenceObjective) -> Tensor:
    """`_smoothed(beta (log policy(c) - log policy(r)) - gamma)`.

    SimPO, arXiv 2405.14734, without the length normalization of eq. 6.
    """
    margins = pairs.chosen_logps - pairs.rejected_logps
    return _smoothed(objective.beta * margins - objective.simpo_gamma, objective.label_smoothing)


_LOSSES = (
    *(_sigmoid, _hinge, _ipo, _exo_pair, _nca_pair, _robust, _bco_pair, _sppo_hard, _aot, _aot_unpaired, _apo_zero),
    *(_apo_down, _discopop, _sft, _sigmoid_norm, _cdpo, _ipo_sum, _simpo, _simpo_sum),
)
LOSSES: dict[str, Callable[[LossInputs, PreferenceObjective], Tensor]] = {x.__name__[1:]: x for x in _LOSSES}
"""By their names, which are those of the functions and, for the losses of TRL's DPOTrainer, those of TRL."""

SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired", "cdpo", "simpo", "simpo_sum")
"""The losses that use label smoothing.

TRL's `sigmoid` does not: it is DPO, not conservative DPO.
"""

REFERENCE_FREE = ("sft", "simpo", "simpo_sum")
"""The losses that do not depend on the reference."""

MARGIN_LOSSES = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft", "sigmoid_norm", "cdpo", "ipo_sum")
"""The losses that allow a divergence other than reverse KL.

The normalizer of such a divergence cancels only in a margin. sft does not depend on the divergence.
"""

SORTED = ("aot", "aot_unpaired")
"""The losses that allow no weights of pairs, because they sort."""


@dataclass(frozen=True)
class PreferenceObjective:
    """A loss, or a weighted sum of losses, with its constants.

    The names and defaults are those of TRL's DPOConfig, and of its CPOConfig for SimPO.

    Attributes:
        loss_type: one or several of sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair,
            sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft, sigmoid_norm, which are
            TRL's, and cdpo, ipo_sum, simpo, simpo_sum. cdpo is DPO with label smoothing; ipo and simpo
            divide by lengths, and ipo_sum and simpo_sum do not.
        loss_weights: one weight per loss, or None for 1 each.
        beta: scale of the log-ratios, positive.
        label_smoothing: probability that a preference is wrong, in [0, 1). Above 0 for exo_pair and
            below 0.5 for robust. Only exo_pair, robust, aot, aot_unpaired, cdpo, simpo and simpo_sum
            use it; it must be 0 without one of them.
        f_divergence_type: reverse_kl, forward_kl, js_divergence or alpha_divergence. All but
            reverse_kl require losses among sigmoid, hinge, ipo, exo_pair, robust, discopop, sft,
            sigmoid_norm, cdpo and ipo_sum.
        f_alpha_divergence_coef: the order alpha of alpha_divergence.
        discopop_tau: the temperature tau of discopop, positive.
        simpo_gamma: the target margin gamma of simpo and simpo_sum.

    Raises:
        TypeError, ValueError: an attribute breaks a rule above; the message names it.
    """

    loss_type: str | Sequence[str] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5

    def __post_init__(self) -> None:
        rule = f"be one or several of {', '.join(LOSSES)}"
        is_named = isinstance(self.loss_type, str | Sequence)
        checks.require(is_named, OP, "loss_type", rule, checks.shown(self.loss_type), error=TypeError)
        losses, eps = self.losses, self.label_smoothing
        known = bool(losses) and all(isinstance(loss, str) and loss in LOSSES for loss in losses)
        checks.require(known, OP, "loss_type", rule, self.loss_type)
        if self.loss_weights is not None:
            weights = self.loss_weights
            fit = isinstance(weights, Sequence) and len(weights) == len(losses)
            rule = f"have one weight for each of {len(losses)} losses"
            checks.require(fit, OP, "loss_weights", rule, checks.shown(weights))
            for weight in weights:
                checks.require_finite(OP, "loss_weights", weight)
        checks.require_positive(OP, "beta", self.beta)
        checks.require_positive(OP, "discopop_tau", self.discopop_tau)
        checks.require_finite(OP, "f_alpha_divergence_coef", self.f_alpha_divergence_coef)
        checks.require_finite(OP, "simpo_gamma", self.simpo_gamma)

        checks.require_number(OP, "label_smoothing", eps, "lie in [0, 1)")
        checks.require(0 <= eps < 1, OP, "label_smoothing", "lie in [0, 1)", eps)
        allowed = eps == 0 or any(loss in SMOOTHED for loss in losses)
        checks.require(allowed, OP, "label_smoothing", f"be 0 without one of {', '.join(SMOOTHED)}", eps)
        checks.require("exo_pair" not in losses or eps > 0, OP, "label_smoothing", "be above 0 for exo_pair", eps)
        checks.require("robust" not in losses or eps < 0.5, OP, "label_smoothing", "be below 0.5 for robust", eps)

        divergence = self.f_divergence_type
        known = isinstance(divergence, str) and divergence in DIVERGENCES
        checks.require(known, OP, "f_divergence_type", f"be one of {', '.join(DIVERGENCES)}", divergence)
        incompatible = [loss for loss in losses if loss not in MARGIN_LOSSES]
        fit = divergence == "reverse_kl" or not incompatible
        checks.require(fit, OP, "f_divergence_type", "be reverse_kl with {}", divergence, ", ".join(incompatible))

    @property
    def losses(self) -> tuple[str, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)


DPO = PreferenceObjective()
