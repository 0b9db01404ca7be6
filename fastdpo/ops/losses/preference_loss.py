"""The losses of TRL 1.16's DPOTrainer as functions of log-probabilities.

Symbols in the formulas:

    c, r          log-ratios log(policy / reference) of a pair's chosen and rejected completion
    f(c), f(r)    their scores; with reverse_kl, f(c) = c
    m             f(c) - f(r)
    |c|, |r|      numbers of completion tokens
    sigma         logistic function
    eps           label smoothing

Dimensions: P pairs, L positions of a padded row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import checks
from ..devices import accumulation_dtype, is_host

OP = "preference_loss"

MAX_EXPONENT = 80.0
"""Upper bound of exponents: e^80 leaves room in float32 for beta and for sums over pairs."""

MAX_SQUARED = 1e17
"""Bound of the absolute scores per token before they are squared, for the same reason."""


class PreferenceLoss(NamedTuple):
    """Result of `preference_loss`, in float32 (float64 if any input is float64).

    Attributes:
        loss: mean of `losses`, a scalar. Differentiable.
        losses: [P] weighted sum of the losses of `loss_type`. Those of `aot` and `aot_unpaired` are
            in sorted order instead of the order of the pairs. Differentiable.
        chosen_rewards: [P] `beta * (chosen_logps - ref_chosen_logps)`, independent of the
            divergence. No gradient.
        rejected_rewards: [P] the same for the rejected completions. No gradient.
    """

    loss: Tensor
    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


class _Pairs(NamedTuple):
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


def _logistic(x: Tensor) -> Tensor:
    """`sigma(x)`, with the gradient `sigma(x) sigma(-x)` for every x.

    That of `torch.sigmoid`, `y (1 - y)`, vanishes where y rounds to 1.
    """
    return torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))


def _reverse_kl(logratios: Tensor, objective: PreferenceObjective) -> Tensor:
    """`f(c) = c`, as in the original DPO."""
    return logratios


def _forward_kl(logratios: Tensor, objective: PreferenceObjective) -> Tensor:
    """`f(c) = 1 - exp(-c)`."""
    return 1 - (-logratios).clamp(max=MAX_EXPONENT).exp()


def _js_divergence(logratios: Tensor, objective: PreferenceObjective) -> Tensor:
    """`f(c) = log 2 + log sigma(c)`."""
    return math.log(2) + F.logsigmoid(logratios)


def _alpha_divergence(logratios: Tensor, objective: PreferenceObjective) -> Tensor:
    """`f(c) = (exp((alpha - 1) c) - 1) / (alpha - 1)`.

    If alpha is within 1e-6 of 1, the limit `f(c) = c`.
    """
    order = objective.f_alpha_divergence_coef - 1
    if abs(order) < 1e-6:
        return logratios
    return ((order * logratios).clamp(max=MAX_EXPONENT).exp() - 1) / order


DIVERGENCES: dict[str, Callable[[Tensor, PreferenceObjective], Tensor]] = {
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "js_divergence": _js_divergence,
    "alpha_divergence": _alpha_divergence,
}
"""Scores of log-ratios: the derivatives of f-DPO (arXiv 2309.16240) without the constants that
cancel in a margin.

They use `exp(x) - 1` instead of `expm1(x)`, whose gradient `expm1(x) + 1` rounds to zero where it
saturates.
"""


def _sigmoid(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`-log sigma(beta m)`. DPO, arXiv 2305.18290, eq. 7."""
    return -F.logsigmoid(objective.beta * pairs.margins)


def _hinge(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`max(0, 1 - beta m)`.

    The hinge loss of SLiC-HF (arXiv 2305.10425) on log-ratios, as in RSO (arXiv 2309.06657).
    """
    return torch.relu(1 - objective.beta * pairs.margins)


def _ipo(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`(f(c) / |c| - f(r) / |r| - 1 / (2 beta))^2`.

    IPO, arXiv 2310.12036, eq. 17, with scores per token.
    """
    chosen, rejected = (x.clamp(-MAX_SQUARED, MAX_SQUARED) for x in _scores_per_token("ipo", pairs))
    return (chosen - rejected - 1 / (2 * objective.beta)) ** 2


def _exo_pair(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`KL(p || q)` with `p = (sigma(beta m), sigma(-beta m))` and `q = (1 - eps, eps)`.

    EXO, arXiv 2402.00856, eq. 16.
    """
    x, eps = objective.beta * pairs.margins, objective.label_smoothing
    of_chosen = _logistic(x) * (F.logsigmoid(x) - math.log1p(-eps))
    of_rejected = _logistic(-x) * (F.logsigmoid(-x) - math.log(eps))
    return of_chosen + of_rejected


def _nca_pair(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`-log sigma(beta c) - (log sigma(-beta c) + log sigma(-beta r)) / 2`.

    NCA, arXiv 2402.05369, section 4.1.
    """
    chosen, rejected = objective.beta * pairs.chosen_logratios, objective.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`(-(1 - eps) log sigma(beta m) + eps log sigma(-beta m)) / (1 - 2 eps)`.

    rDPO, arXiv 2403.00409, section 3.1.
    """
    x, eps = objective.beta * pairs.margins, objective.label_smoothing
    return (-(1 - eps) * F.logsigmoid(x) + eps * F.logsigmoid(-x)) / (1 - 2 * eps)


def _bco_pair(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`-log sigma(beta c) - log sigma(-beta r)`.

    BCO, arXiv 2404.04656, section 4, without its reward shift.
    """
    chosen, rejected = objective.beta * pairs.chosen_logratios, objective.beta * pairs.rejected_logratios
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo_hard(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2`.

    SPPO, arXiv 2405.00675, eq. 4.7 with hard preferences.
    """
    target = 0.5 / objective.beta
    return (pairs.chosen_logratios - target) ** 2 + (pairs.rejected_logratios + target) ** 2


def _aot(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`_smoothed(beta (sort(policy) - sort(reference)))` of the log-ratios of chosen to rejected.

    AOT for paired data, arXiv 2406.05882, section 3.
    """
    policy = (pairs.chosen_logps - pairs.rejected_logps).sort().values
    reference = (pairs.ref_chosen_logps - pairs.ref_rejected_logps).sort().values
    return _smoothed(objective.beta * (policy - reference), objective.label_smoothing)


def _aot_unpaired(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`_smoothed(beta (sort(c) - sort(r)))`. AOT for unpaired data, arXiv 2406.05882, section 3."""
    chosen, rejected = pairs.chosen_logratios.sort().values, pairs.rejected_logratios.sort().values
    return _smoothed(objective.beta * (chosen - rejected), objective.label_smoothing)


def _apo_zero(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`1 - sigma(beta c) + sigma(beta r)`. APO, arXiv 2408.06266, eq. 7."""
    chosen, rejected = objective.beta * pairs.chosen_logratios, objective.beta * pairs.rejected_logratios
    return _logistic(-chosen) + _logistic(rejected)


def _apo_down(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`sigma(beta c) + 1 - sigma(beta (c - r))`. APO, arXiv 2408.06266, eq. 8."""
    chosen, rejected = objective.beta * pairs.chosen_logratios, objective.beta * pairs.rejected_logratios
    return _logistic(chosen) + _logistic(rejected - chosen)


def _discopop(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`-(1 - g) log sigma(beta m) + g exp(-beta m)` with `g = sigma(beta m / tau)`.

    DiscoPOP, arXiv 2406.08414, eq. 5. The code adds log g to the exponent, so that the product does
    not overflow: with tau below 1, g falls faster than `exp(-beta m)` rises.
    """
    x = objective.beta * pairs.margins
    gate = x / objective.discopop_tau
    exponential = (F.logsigmoid(gate) - x).clamp(max=MAX_EXPONENT).exp()
    return exponential - _logistic(-gate) * F.logsigmoid(x)


def _sft(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`-log policy` of the chosen completion.

    Scaled so that its mean over pairs is the mean over all chosen tokens.
    """
    tokens = _given("sft", "chosen_lengths", pairs.chosen_lengths).sum().clamp(min=1)
    return -pairs.sft_logps * len(pairs.sft_logps) / tokens


def _sigmoid_norm(pairs: _Pairs, objective: PreferenceObjective) -> Tensor:
    """`-log sigma(beta (f(c) / |c| - f(r) / |r|))`.

    Length-normalized DPO of Tulu 3, arXiv 2411.15124.
    """
    chosen, rejected = _scores_per_token("sigmoid_norm", pairs)
    return -F.logsigmoid(objective.beta * (chosen - rejected))


LOSSES: dict[str, Callable[[_Pairs, PreferenceObjective], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sft": _sft,
    "sigmoid_norm": _sigmoid_norm,
}

SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
"""The losses that use label smoothing.

TRL's `sigmoid` does not: it is DPO, not conservative DPO.
"""

MARGIN_LOSSES = ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft", "sigmoid_norm")
"""The losses that allow a divergence other than reverse KL.

The normalizer of such a divergence cancels only in a margin. sft does not depend on the divergence.
"""

SORTED = ("aot", "aot_unpaired")
"""The losses that allow no weights of pairs, because they sort."""


def _scores_per_token(loss: str, pairs: _Pairs) -> tuple[Tensor, Tensor]:
    chosen = _given(loss, "chosen_lengths", pairs.chosen_lengths).clamp(min=1)
    rejected = _given(loss, "rejected_lengths", pairs.rejected_lengths).clamp(min=1)
    return pairs.chosen_scores / chosen, pairs.rejected_scores / rejected


def _smoothed(x: Tensor, eps: float) -> Tensor:
    """`-(1 - eps) log sigma(x) - eps log sigma(-x)`."""
    return -(1 - eps) * F.logsigmoid(x) - eps * F.logsigmoid(-x)


def _given(loss: str, argument: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(f"{OP}: {argument} must be given for the loss {loss}; got None")
    return value


@dataclass(frozen=True)
class PreferenceObjective:
    """A loss, or a weighted sum of losses, with its constants.

    The names and defaults are those of TRL's DPOConfig.

    Attributes:
        loss_type: one or several of sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair,
            sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft, sigmoid_norm.
        loss_weights: one weight per loss, or None for 1 each.
        beta: scale of the log-ratios, positive.
        label_smoothing: probability that a preference is wrong, in [0, 1). Above 0 for exo_pair and
            below 0.5 for robust. Only exo_pair, robust, aot and aot_unpaired use it; it must be 0
            without one of them.
        f_divergence_type: reverse_kl, forward_kl, js_divergence or alpha_divergence. All but
            reverse_kl require losses among sigmoid, hinge, ipo, exo_pair, robust, discopop, sft and
            sigmoid_norm.
        f_alpha_divergence_coef: the order alpha of alpha_divergence.
        discopop_tau: the temperature tau of discopop, positive.

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


def preference_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    objective: PreferenceObjective = DPO,
    *,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    sft_logps: Tensor | None = None,
    weights: Tensor | None = None,
) -> PreferenceLoss:
    """Loss of a batch of preference pairs, equal to that of TRL 1.16's DPOTrainer up to rounding.

    Plain PyTorch in float32 (float64 if any input is float64), without synchronization with the
    host.

    The loss stays finite where TRL's overflows in float32: exponents of forward_kl and discopop are
    bounded by 80, as TRL bounds those of alpha_divergence, and the scores per token that ipo
    squares are bounded by 1e17. Beyond these bounds the gradient is zero. With tau below 1,
    discopop does not reach its bound.

    Args:
        chosen_logps: [P] summed log-probabilities of the chosen completions, in nats; float16,
            bfloat16, float32 or float64. For example from `sequence_logps` or
            `length_desensitized_logps`.
        rejected_logps: [P] the same for the rejected completions.
        ref_chosen_logps, ref_rejected_logps: [P] the same under the reference model. They receive
            no gradient.
        objective: the loss and its constants. Default: DPO with beta 0.1.
        chosen_lengths, rejected_lengths: [P] numbers of completion tokens. Required by ipo and
            sigmoid_norm; sft requires `chosen_lengths`.
        sft_logps: [P] log-probabilities for sft in place of `chosen_logps`. Pass the plain sums
            here if `chosen_logps` come from `length_desensitized_logps`.
        weights: [P] factors of the pairs' losses, for example from `wpo_weights`. Must be None for
            aot and aot_unpaired, which sort.

    Returns:
        `PreferenceLoss`.

    Raises:
        ValueError: a shape, device or value breaks a rule above, or the objective needs an argument
            that is None; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
    """
    floating = dict(
        chosen_logps=chosen_logps,
        rejected_logps=rejected_logps,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
        sft_logps=sft_logps,
        weights=weights,
    )
    lengths = dict(chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
    given = {**floating, **lengths}
    required = ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps")
    checks.require_tensors(OP, **{name: given[name] for name in required})
    checks.require_tensors_or_none(OP, **given)
    require_objective(OP, objective)
    checks.require_floating(OP, **floating)
    for name, x in lengths.items():
        is_number = x is None or not (x.dtype.is_complex or x.dtype == torch.bool)
        checks.require(is_number, OP, name, "be int or floating point", x if x is None else x.dtype, error=TypeError)
    not_empty = chosen_logps.dim() == 1 and len(chosen_logps) > 0
    checks.require(not_empty, OP, "chosen_logps", "be [P], P > 0", list(chosen_logps.shape))
    for name, x in given.items():
        if x is not None:
            checks.require(x.shape == chosen_logps.shape, OP, name, "be [{}]", list(x.shape), len(chosen_logps))
    checks.require_same_device(OP, **given)
    if is_host(chosen_logps.device) and not torch.compiler.is_compiling():  # elsewhere it would synchronize
        for name, x in lengths.items():
            checks.require(x is None or bool((x >= 0).all()), OP, name, "be 0 or more", "a negative or NaN length")
    unsorted = weights is None or not any(loss in SORTED for loss in objective.losses)
    checks.require(unsorted, OP, "weights", f"be None with {' and '.join(SORTED)}, which sort", "weights of pairs")

    dtype = loss_dtype(*floating.values())
    chosen, rejected = chosen_logps.to(dtype), rejected_logps.to(dtype)
    ref_chosen, ref_rejected = ref_chosen_logps.detach().to(dtype), ref_rejected_logps.detach().to(dtype)
    score = DIVERGENCES[objective.f_divergence_type]
    pairs = _Pairs(
        chosen,
        rejected,
        ref_chosen,
        ref_rejected,
        chosen_scores=score(chosen - ref_chosen, objective),
        rejected_scores=score(rejected - ref_rejected, objective),
        sft_logps=chosen if sft_logps is None else sft_logps.to(dtype),
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
    )
    loss_weights = objective.loss_weights or [1.0] * len(objective.losses)
    terms = [
        weight * LOSSES[loss](pairs, objective) for loss, weight in zip(objective.losses, loss_weights, strict=True)
    ]
    losses = torch.stack(terms).sum(0)
    if weights is not None:
        losses = losses * weights.to(dtype)
    return PreferenceLoss(
        loss=losses.mean(),
        losses=losses,
        chosen_rewards=objective.beta * pairs.chosen_logratios.detach(),
        rejected_rewards=objective.beta * pairs.rejected_logratios.detach(),
    )


def require_objective(op: str, objective: object) -> None:
    rule = 'be a PreferenceObjective, such as PreferenceObjective(loss_type="ipo")'
    is_objective = isinstance(objective, PreferenceObjective)
    checks.require(is_objective, op, "objective", rule, checks.shown(objective), error=TypeError)


def loss_dtype(*inputs: Tensor | None) -> torch.dtype:
    """The dtype of losses: float32, or float64 if any of these inputs is."""
    return reduce(torch.promote_types, (accumulation_dtype(x.dtype) for x in inputs if x is not None))


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
