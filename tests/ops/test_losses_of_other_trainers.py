"""cDPO, IPO by sums and SimPO equal their formulas in float64, stay finite, and need no reference if they have none."""

import pytest
import torch
from torch import Tensor

from fastdpo.ops import PreferenceObjective, preference_loss
from fastdpo.ops.losses.objectives import REFERENCE_FREE

BETA, EPS, GAMMA = 0.4, 0.15, 0.8
OTHERS = ["cdpo", "ipo_sum", "simpo", "simpo_sum"]


def formula(name: str, c: Tensor, r: Tensor, ref_c: Tensor, ref_r: Tensor, n_c: Tensor, n_r: Tensor) -> Tensor:
    """The losses of the papers, written out."""
    h = (c - ref_c) - (r - ref_r)
    if name == "cdpo":
        p = 1 / (1 + torch.exp(-BETA * h))
        return -(1 - EPS) * p.log() - EPS * (1 - p).log()
    if name == "ipo_sum":
        return (h - 1 / (2 * BETA)) ** 2
    margin = c / n_c - r / n_r if name == "simpo" else c - r
    return torch.log(1 + torch.exp(-(BETA * margin - GAMMA)))


def objective(name: str) -> PreferenceObjective:
    return PreferenceObjective(name, beta=BETA, simpo_gamma=GAMMA, label_smoothing=EPS if name == "cdpo" else 0.0)


@pytest.fixture
def pairs():
    torch.manual_seed(0)
    logps = [-5 * torch.rand(4, dtype=torch.float64) - 1 for _ in range(4)]
    return *logps, torch.tensor([3, 1, 4, 2]), torch.tensor([2, 5, 1, 4])


@pytest.mark.parametrize("name", OTHERS)
def test_losses_and_gradients_are_those_of_the_papers(name, pairs):
    *logps, n_c, n_r = (x.clone().requires_grad_(x.is_floating_point()) for x in pairs)
    result = preference_loss(*logps, objective(name), chosen_lengths=n_c, rejected_lengths=n_r)
    expected = formula(name, *logps, n_c, n_r)
    torch.testing.assert_close(result.losses, expected)
    torch.testing.assert_close(result.loss, expected.mean())
    for a, b in zip(*(torch.autograd.grad(x, logps[:2]) for x in (result.loss, expected.mean())), strict=True):
        torch.testing.assert_close(a, b)


def test_smoothing_of_cdpo_interpolates_between_both_preferences(pairs):
    c, r, ref_c, ref_r, *_ = pairs
    dpo = [preference_loss(*x).losses for x in ((c, r, ref_c, ref_r), (r, c, ref_r, ref_c))]
    smoothed = preference_loss(c, r, ref_c, ref_r, PreferenceObjective("cdpo", label_smoothing=0.3)).losses
    torch.testing.assert_close(smoothed, 0.7 * dpo[0] + 0.3 * dpo[1])
    torch.testing.assert_close(preference_loss(c, r, ref_c, ref_r, PreferenceObjective("cdpo")).losses, dpo[0])


def test_losses_without_a_reference(pairs):
    c, r, ref_c, ref_r, n_c, n_r = pairs
    lengths = dict(chosen_lengths=n_c, rejected_lengths=n_r)
    for name in REFERENCE_FREE:
        free, given = preference_loss(c, r, objective=objective(name), **lengths), objective(name)
        torch.testing.assert_close(free.losses, preference_loss(c, r, ref_c, ref_r, given, **lengths).losses)
        torch.testing.assert_close(free.chosen_rewards, BETA * (c / n_c if name == "simpo" else c))
    with pytest.raises(TypeError, match=r"^preference_loss: ref_chosen_logps must be a tensor; got None"):
        preference_loss(c, r)
    with pytest.raises(ValueError, match=r"^preference_loss: rejected_lengths must be given for the loss simpo"):
        preference_loss(c, r, objective=PreferenceObjective("simpo"), chosen_lengths=n_c)
