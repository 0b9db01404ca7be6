"""Log-probabilities and gradients of a model under dropout, and tests of their distributions.

A draw is one forward pass with new dropout masks. A batch holds many copies of a few pairs, each of
which is a draw of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from fastdpo.models import forward
from fastdpo.models.state import ForwardOptions
from fastdpo.packing import IGNORE_INDEX

BETA = 0.1
PROJECTIONS = 8
"""Gradients are compared in this many random directions."""


class Pairs(NamedTuple):
    """A batch of P pairs without padding.

    Attributes:
        ids: int64 [2P, L], chosen rows first.
        labels: int64 [2P, L], `IGNORE_INDEX` in prompts.
    """

    ids: Tensor
    labels: Tensor

    def copies(self, n: int) -> Pairs:
        """The batch with each pair n times, as [n, P] pairs."""
        return Pairs(*(torch.cat([half.repeat(n, 1) for half in x.chunk(2)]) for x in self))


class Draws(NamedTuple):
    """What a model returned with different dropout masks.

    Attributes:
        logps: float64 [N, P, 2], sums over the tokens of chosen and rejected rows.
        slopes: float64 [C, PROJECTIONS], the gradient of the sum of all `logps`, of C calls, each
            averaged over its draws, in random directions.
        loss_slopes: [C, PROJECTIONS], the same of DPO's loss.
    """

    logps: Tensor
    slopes: Tensor
    loss_slopes: Tensor

    def margins(self) -> Tensor:
        """[N, P] log-probability of chosen minus rejected rows."""
        return self.logps[..., 0] - self.logps[..., 1]


Score = Callable[[nn.Module, Pairs], Tensor]
"""Sums of log-probabilities [2P] of a batch."""


def stock_score(model: nn.Module, pairs: Pairs) -> Tensor:
    """The rows one by one, without fastdpo."""
    logits = model(input_ids=pairs.ids, attention_mask=torch.ones_like(pairs.ids)).logits[:, :-1]
    targets = pairs.labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none")
    return -losses.sum(1)


def fused_score(model: nn.Module, pairs: Pairs) -> Tensor:
    """The fused forward of `install`."""
    mask = torch.ones_like(pairs.ids)
    return model(input_ids=pairs.ids, attention_mask=mask, labels=pairs.labels, fused_lm_head=True).sum(1)


def install(model: nn.Module, **options: Any) -> None:
    """Makes `fused_score` compute a model's log-probabilities, with options of `ForwardOptions`."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    request = ForwardOptions("tests", "policy", groups="pairs", **options)  # else copies would share their masks
    forward.install(base, request, lambda scored, _: scored.logps.logps, prior_scores=False)


def draw(model: nn.Module, pairs: Pairs, score: Score, *, calls: int, copies: int, seed: int = 0) -> Draws:
    """Calls a model in training mode, each time on new copies of the pairs."""
    parameters = [x for x in model.parameters() if x.requires_grad]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(PROJECTIONS, x.numel(), generator=generator) for x in parameters]
    model.eval()
    with torch.no_grad():
        reference = stock_score(model, pairs).view(2, 1, -1)  # [2, 1, P], without dropout
    model.train()
    torch.manual_seed(seed)
    found: tuple[list[Tensor], ...] = ([], [], [])
    batch = pairs.copies(copies)
    for _ in range(calls):
        for slopes in found[1:]:
            logps = score(model, batch).view(2, copies, -1)  # [2, copies, P]
            gains = logps - reference
            is_loss = slopes is found[2]
            value = -F.logsigmoid(BETA * (gains[0] - gains[1])) if is_loss else logps.sum(0)
            gradients = torch.autograd.grad(value.mean(), parameters)
            slopes.append(sum(d @ g.flatten() for d, g in zip(directions, gradients, strict=True)).double())
            found[0].append(logps.detach().double().permute(1, 2, 0))
    return Draws(torch.cat(found[0]), *(torch.stack(x) for x in found[1:]))


def mean_p_value(a: Tensor, b: Tensor) -> float:
    """The probability of means of [N, ...] draws that differ as much as these if the expectations
    are equal: the smallest of Welch's tests over the other dimensions, times their number
    (Bonferroni).
    """
    p = stats.ttest_ind(a.flatten(1).numpy(), b.flatten(1).numpy(), equal_var=False).pvalue
    return float(min(1.0, p.min() * p.size))


def distribution_p_value(a: Tensor, b: Tensor) -> float:
    """The probability of draws [N, ...] that differ as much as these if their distributions are equal:
    the smallest of Kolmogorov-Smirnov's tests over the other dimensions, times their number.
    """
    pairs = zip(a.flatten(1).T.numpy(), b.flatten(1).T.numpy(), strict=True)
    p = [float(stats.ks_2samp(*pair).pvalue) for pair in pairs]
    return min(1.0, min(p) * len(p))


def larger_variance_p_value(a: Tensor, b: Tensor) -> float:
    """The probability of variances of a [N, P] as far above those of b as these if they are equal:
    the smallest of one-sided Brown-Forsythe tests over the columns, times their number.
    """
    spread_a, spread_b = ((x - x.median(0).values).abs().numpy() for x in (a, b))
    p = stats.ttest_ind(spread_a, spread_b, equal_var=False, alternative="greater").pvalue
    return float(min(1.0, p.min() * p.size))
