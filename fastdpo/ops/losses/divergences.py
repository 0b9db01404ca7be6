"""Scores f(c) of log-ratios c: the derivatives of f-DPO (arXiv 2309.16240) without constants that cancel in a margin.

They use `exp(x) - 1` instead of `expm1(x)`, whose gradient `expm1(x) + 1` rounds to zero where it
saturates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

MAX_EXPONENT = 80.0
"""Upper bound of exponents: e^80 leaves room in float32 for beta and for sums over pairs."""


def _reverse_kl(logratios: Tensor, alpha: float) -> Tensor:
    """`f(c) = c`, as in the original DPO."""
    return logratios


def _forward_kl(logratios: Tensor, alpha: float) -> Tensor:
    """`f(c) = 1 - exp(-c)`."""
    return 1 - (-logratios).clamp(max=MAX_EXPONENT).exp()


def _js_divergence(logratios: Tensor, alpha: float) -> Tensor:
    """`f(c) = log 2 + log sigma(c)`."""
    return math.log(2) + F.logsigmoid(logratios)


def _alpha_divergence(logratios: Tensor, alpha: float) -> Tensor:
    """`f(c) = (exp((alpha - 1) c) - 1) / (alpha - 1)`.

    If alpha is within 1e-6 of 1, the limit `f(c) = c`.
    """
    order = alpha - 1
    if abs(order) < 1e-6:
        return logratios
    return ((order * logratios).clamp(max=MAX_EXPONENT).exp() - 1) / order


_DIVERGENCES = (_reverse_kl, _forward_kl, _js_divergence, _alpha_divergence)
DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {x.__name__[1:]: x for x in _DIVERGENCES}
"""Scores of log-ratios by the name of the divergence. Only that of alpha_divergence depends on alpha."""
