"""Preference losses of random pairs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from fastdpo import ops
from fastdpo.accuracy import error
from fastdpo.ops.losses.divergences import DIVERGENCES
from fastdpo.ops.losses.objectives import LOSSES, MARGIN_LOSSES, SMOOTHED, SORTED
from tests.support.fuzzing import SEEDS, Source, fuzzed


class Pairs(NamedTuple):
    """Log-probabilities of pairs, and an objective.

    Attributes:
        size: of the log-probabilities, in nats.
    """

    seed: int
    pairs: int
    size: float
    loss_type: tuple[str, ...]
    divergence: str
    beta: float
    alpha: float
    smoothing: float
    weighted: bool


PAIRS = st.builds(
    Pairs,
    seed=SEEDS,
    pairs=st.integers(1, 6),
    size=st.sampled_from([0.1, 3.0, 100.0, 1e4]),
    loss_type=st.lists(st.sampled_from(tuple(LOSSES)), min_size=1, max_size=3, unique=True).map(tuple),
    divergence=st.sampled_from(tuple(DIVERGENCES)),
    beta=st.sampled_from([0.01, 0.1, 1.0]),
    alpha=st.sampled_from([0.0, 0.5, 1.0, 1.0 + 1e-7, 2.0]),
    smoothing=st.sampled_from([0.0, 0.1, 0.4]),
    weighted=st.booleans(),
)


def objective_of(case: Pairs) -> ops.PreferenceObjective:
    smoothing = case.smoothing if any(loss in SMOOTHED for loss in case.loss_type) else 0.0
    smoothing = 0.2 if smoothing == 0 and "exo_pair" in case.loss_type else smoothing
    divergence = case.divergence if all(loss in MARGIN_LOSSES for loss in case.loss_type) else "reverse_kl"
    return ops.PreferenceObjective(
        case.loss_type,
        beta=case.beta,
        label_smoothing=smoothing,
        f_divergence_type=divergence,
        f_alpha_divergence_coef=case.alpha,
    )


def check_loss(case: Pairs) -> None:
    """Finite, with finite gradients, independent of the order of pairs, and linear in weights."""
    source, objective = Source(case.seed), objective_of(case)
    logps = [source.normal(case.pairs, dtype=torch.float32, scale=case.size).requires_grad_() for _ in range(4)]
    lengths = dict(chosen_lengths=source.integers(0, 9, case.pairs), rejected_lengths=source.integers(1, 9, case.pairs))
    sorts = any(loss in SORTED for loss in case.loss_type)
    weights = source.normal(case.pairs).float() if case.weighted and not sorts else None
    result = ops.preference_loss(*logps, objective, **lengths, weights=weights)
    assert result.losses.isfinite().all()
    assert torch.equal(result.loss, result.losses.mean())
    gradients = torch.autograd.grad(result.loss, logps[:2], allow_unused=True)
    assert all(x is None or bool(x.isfinite().all()) for x in gradients)
    assert torch.equal(result.chosen_rewards, objective.beta * (logps[0] - logps[2]).detach())

    order = source.integers(0, 10**6, case.pairs).argsort()
    shuffled = {name: x[order] for name, x in lengths.items()}
    again = ops.preference_loss(
        *(x[order] for x in logps), objective, **shuffled, weights=None if weights is None else weights[order]
    )
    expected = result.losses if sorts and len(case.loss_type) == 1 else result.losses[order]
    if not sorts or len(case.loss_type) == 1:
        assert error(again.losses, expected) < 1e-5
    if weights is not None:
        plain = ops.preference_loss(*logps, objective, **lengths)
        assert torch.equal(result.losses, plain.losses * weights)


OVERFLOWING = Pairs(0, 2, 1e4, ("ipo", "discopop"), "forward_kl", 1.0, 0.0, 0.0, False)

test_preference_loss = fuzzed(PAIRS, 0.06, (OVERFLOWING,))(check_loss)
