import math

import pytest
import torch
from torch import nn

from fastdpo import accuracy

INF, NAN = math.inf, math.nan
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("x", "exact", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([INF, 3.0, 4.5], [INF, 3.0, 4.0], 0.1),  # an infinity has no size
        ([-INF, 1.0], [INF, 1.0], INF),
        ([1.0, INF], [1.0, 2.0], INF),
        ([0.5], [0.0], 0.5),  # absolute where the exact result is zero
    ],
)
def test_error(x, exact, expected):
    x, exact = torch.tensor(x), torch.tensor(exact)
    assert accuracy.error(x, exact) == pytest.approx(expected)
    assert accuracy.error(x, exact, equal_nan=True) == pytest.approx(expected)


def test_nan_equals_nan_only_if_that_is_asked_for():
    x = torch.tensor([NAN, 1.0])
    assert math.isnan(accuracy.error(x, x))
    assert accuracy.error(x, x, equal_nan=True) == 0
    assert math.isnan(accuracy.error(x, torch.ones(2), equal_nan=True))


def test_errors_of_rows():
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, NAN]])
    errors = accuracy.row_errors(expected * 1.5, expected)
    assert errors[:2].tolist() == [0.5, 0.0]
    assert errors[2].isnan()


ONES = torch.ones(4)
DIFFERENCES = {
    "rounding": (ONES * 1.004, ONES * 1.001, {}, True),
    "more than rounding": (ONES * 1.01, ONES * 1.001, {}, False),
    "NaN": (torch.tensor([NAN, 1.0, 1.0, 1.0]), ONES * 1.001, {}, False),
    "a small difference of large numbers": (ONES * 1.01, ONES * 1.001, dict(scale=1e5 * ONES), True),
    "one flipped comparison": (ONES * 1.01, ONES, dict(count=0.01), True),
    "two flipped comparisons": (ONES * 1.02, ONES, dict(count=0.01), False),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_rounding_explains(name):
    fused, rounded, options, explained = DIFFERENCES[name]
    found = accuracy.run_difference("x", fused.double(), ONES.double(), rounded.double(), 2.0**-23, **options)
    assert found.is_explained == explained
    assert str(found).startswith("x by ")


@pytest.mark.parametrize("sides", [(None, ONES, ONES), (ONES, None, ONES), (ONES[:2], ONES, ONES), (ONES, ONES, None)])
def test_what_one_side_has_not_computed_is_not_explained(sides):
    found = accuracy.run_difference("x", *sides, 2.0**-7)
    assert not found.is_explained
    assert str(found).startswith("x: fastdpo has computed ")


def test_a_fixed_perturbation_draws_no_random_numbers_and_changes_each_entry_by_one_unit():
    before, x = torch.get_rng_state(), torch.linspace(1, 2, 100)
    rounded = accuracy.fixed_rounding(x, 2.0**-10)
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close((rounded / x - 1).abs(), torch.full((100,), 2.0**-10), rtol=1e-3, atol=0)


def test_layers_are_perturbed_in_the_block_only():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Embedding(2, 2))
    model[2].forward = lambda ids: ids  # an output of integers stays as it is
    x = torch.ones(1, 4)
    with torch.no_grad():
        plain = model[0](x)
        with accuracy.perturbed(accuracy.layers_of(model), accuracy.random_rounding, 2.0**-10):
            rounded = model[0](x)
            assert model[2](torch.tensor([1])).item() == 1
        assert torch.equal(model[0](x), plain)
    assert 0 < accuracy.error(rounded, plain) <= 2.0**-11
    assert not model[0]._forward_hooks


def test_units(monkeypatch):
    model = nn.Linear(2, 2)
    assert accuracy.training_unit(model) == 2.0**-23
    assert 2.0**-23 <= accuracy.product_unit(CPU) < 2.0**-20, "float32 products are no TF32 products"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert accuracy.training_unit(model) == 2.0**-7
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert accuracy.training_unit(model) == 2.0**-10
    assert accuracy.training_unit(model.to(torch.bfloat16)) == 2.0**-7
