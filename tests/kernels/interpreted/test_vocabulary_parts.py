"""Heads that are cut over the vocabulary, through the Triton kernels of the rows of each part."""

import pytest
import torch

from fastdpo.ops import definitions
from fastdpo.testing import assert_as_accurate_as
from tests.support.ops.heads import REAL_OUTPUTS, doubled, head_inputs, results_and_gradients
from tests.support.ops.simulated_ranks import results_and_gradients_of_ranks

V = 4200  # more than a block of the kernels' columns
SIZES = {"even": (1400, 1400, 1400), "uneven": (1, 4150, 49)}
TRANSFORM = dict(softcap=5.0, logit_scale=1.7, temperature=0.7)
MODES = {"frozen": (("hidden",), 0), "kept": (("hidden", "weight", "bias"), 1 << 30), "recomputed": (("weight",), 0)}


def assert_accurate(inputs, sizes, upstream, **options):
    ranks, gradients = results_and_gradients_of_ranks(inputs, sizes, upstream, **options)
    options.pop("memory_budget")
    eager, eager_gradients = results_and_gradients(definitions.linear_logps, inputs, upstream, **options)
    exact, exact_gradients = results_and_gradients(
        definitions.linear_logps, doubled(inputs), upstream.double(), **options
    )
    for mine in ranks:
        assert torch.equal(mine.is_top1, exact.is_top1)
        for name in REAL_OUTPUTS:
            assert torch.equal(getattr(mine, name), getattr(ranks[0], name))
            assert_as_accurate_as(getattr(mine, name), getattr(eager, name), getattr(exact, name))
    for name, gradient in gradients.items():
        assert_as_accurate_as(gradient, eager_gradients[name], exact_gradients[name])


@pytest.mark.parametrize("differentiate", [("logps",), ("logps", "entropy")], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transform", [{}, TRANSFORM], ids=["plain", "all"])
@pytest.mark.parametrize("cut", SIZES)
def test_parts_are_as_accurate_as_eager(cut, transform, mode, differentiate, launches):
    inputs, upstream = head_inputs(7, V, 16), torch.randn(2, 7)
    inputs["targets"][:4] = torch.tensor([0, 1, V - 1, -100])
    needs, budget = MODES[mode]
    options = dict(needs=needs, memory_budget=budget, differentiate=differentiate, **transform)
    assert_accurate(inputs, SIZES[cut], upstream, **options)
    assert launches["token_logps_fwd"] == 6


@pytest.mark.parametrize("differentiate", [("logps",), ("logps", "entropy")], ids=str)
def test_a_part_without_a_possible_entry(differentiate):
    inputs, upstream = head_inputs(5, 300, 16), torch.randn(2, 5)
    inputs["bias"][200:] = -torch.inf
    inputs["targets"] = inputs["targets"].clamp(max=199)
    shorter = {**inputs, "weight": inputs["weight"][:200], "bias": inputs["bias"][:200]}
    (mine, *_), gradients = results_and_gradients_of_ranks(inputs, (200, 100), upstream, differentiate=differentiate)
    exact, expected = results_and_gradients(
        definitions.linear_logps, doubled(shorter), upstream.double(), differentiate=differentiate
    )
    for name in ("logps", "entropy", "log_sum_sq_probs"):
        torch.testing.assert_close(getattr(mine, name).double(), getattr(exact, name).double(), rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient[:200].double(), expected[name].double(), rtol=1e-4, atol=1e-5)
        assert name == "hidden" or not gradient[200:].any()


def test_ties_are_won_by_the_first():
    weight = torch.zeros(300, 2)
    weight[[0, 299], 0], weight[[150, 180], 1] = 1, 1
    targets = torch.tensor([0, 299, 150, 180])
    inputs = dict(hidden=torch.eye(2)[[0, 0, 1, 1]], weight=weight, bias=None, targets=targets)
    ranks, _ = results_and_gradients_of_ranks(inputs, (100, 100, 100), needs=())
    assert all(mine.is_top1.tolist() == [True, False, True, False] for mine in ranks)


def test_unknown_targets_make_their_rows_nan():
    inputs = head_inputs(4, 300, 16)
    inputs["targets"][2] = 300
    inputs["targets"][3] = 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastdpo.ops.head.results.is_host", lambda device: False)
        for differentiate in (("logps",), ("logps", "entropy")):
            ranks, gradients = results_and_gradients_of_ranks(inputs, (100, 200), differentiate=differentiate)
            assert all(mine.logps.isnan().tolist() == [False, False, True, False] for mine in ranks)
            assert gradients["hidden"].isnan().any(1).tolist() == [False, False, True, False]
            upstream = torch.ones(2, 4).index_fill(1, torch.tensor([2]), 0)
            _, gradients = results_and_gradients_of_ranks(inputs, (100, 200), upstream, differentiate=differentiate)
            assert all(x.isfinite().all() for x in gradients.values())
