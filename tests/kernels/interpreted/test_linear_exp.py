"""The fused head kernel, in addition to the tests in tests/ops that run with `fused_heads.json`."""

import pytest
import torch
from special_rows import SPECIAL_ROWS, special_row

from fastdpo.kernels import linear_exp
from fastdpo.kernels.linear_exp import FusedConfig, linear_exp_fwd, linear_exp_tile
from fastdpo.kernels.linear_logps import target_logits
from fastdpo.ops import reference
from fastdpo.ops.results import STATISTICS
from fastdpo.testing import error

PLAIN = (None, 1.0, 1.0)
CAPPED = (5.0, 1.7, 0.7)
EVERYTHING = ",".join(STATISTICS)
CONFIG = FusedConfig(16, 32, 16, 4, 2)


def inputs(n, v, d, dtype=torch.float32):
    hidden, weight, bias = torch.randn(n, d, dtype=dtype), torch.randn(v, d, dtype=dtype), torch.randn(v, dtype=dtype)
    targets = torch.randint(v, (n,))
    targets[0], targets[1] = v - 1, -100
    hidden[2] += weight[targets[2]]
    return hidden, weight, bias, targets


def call(hidden, weight, bias, targets, transform=PLAIN, tile=None, statistics=EVERYTHING):
    given = target_logits(hidden, weight, bias, targets, *transform)
    values = linear_exp_fwd(hidden, weight, bias, targets, given, *transform, statistics, tile, CONFIG)
    return dict(zip(("logps", "shift", "others", "total", *filter(None, statistics.split(","))), values, strict=True))


def exact(hidden, weight, bias, targets, transform=PLAIN):
    """Exact results and gradients of the logits."""
    softcap, logit_scale, temperature = transform
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double()).requires_grad_()
    options = dict(softcap=softcap, logit_scale=logit_scale, temperature=temperature)
    results = reference.token_logps(logits, targets, outputs=("logps", *STATISTICS), **options)
    results.logps.sum().backward()
    return results, logits.grad


@pytest.mark.parametrize("transform", [PLAIN, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("shape", [(3, 33, 5), (17, 64, 16), (40, 131, 24)], ids=str)
def test_results_and_tile(shape, transform):
    """Shapes with partial blocks in every dimension, whole blocks, and several of each."""
    tensors = inputs(*shape)
    tile = torch.full((shape[0], shape[1] + 16), torch.nan)[:, : shape[1]]  # rows with a gap between them
    results = call(*tensors, transform, tile)
    expected, gradient = exact(*tensors, transform)
    for name in ("logps", "entropy", "mean_logits", "log_sum_sq_probs"):
        assert error(results[name], getattr(expected, name)) < 2e-6
    assert torch.equal(results["is_top1"], expected.is_top1)
    gain = transform[1] / transform[2]
    assert error(tile * (-gain / results["total"])[:, None], gradient) < 2e-6
    again = torch.full_like(tile, torch.nan)
    hidden, weight, bias, targets = tensors
    linear_exp_tile(hidden, weight, bias, targets, results["shift"], results["others"], *transform, again, CONFIG)
    assert error(again, tile) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operands_loaded_by_tensor_descriptors(dtype, monkeypatch):
    """As on Hopper and later, with partial blocks in every dimension."""
    tensors = inputs(37, 131, 24, dtype)
    expected = call(*tensors, tile=(tile := torch.empty(37, 131, dtype=dtype)))
    monkeypatch.setattr(linear_exp, "takes_descriptors", lambda x: True)
    found = call(*tensors, tile=(again := torch.empty(37, 131, dtype=dtype)))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(tile, again)


def test_sums_do_not_depend_on_the_tile():
    tensors = inputs(17, 131, 24)
    with_tile, without = (call(*tensors, tile=tile) for tile in (torch.empty(17, 131), None))
    assert all(torch.equal(with_tile[name], without[name]) for name in without)


@pytest.mark.parametrize("statistics", ["", EVERYTHING])
@pytest.mark.parametrize("gap", [60.0, 100.0, 300.0])
def test_targets_far_below_the_largest_logit(gap, statistics):
    """Gaps within the range of all sums, beyond that of squares, and beyond that of all sums."""
    hidden, weight, bias, targets = inputs(5, 131, 24)
    bias[targets[3]] = -gap
    bias[targets[4]] = -gap
    tile = torch.empty(5, 131)
    results = call(hidden, weight, bias, targets, tile=tile, statistics=statistics)
    expected, gradient = exact(hidden, weight, bias, targets)
    assert (expected.logps[3:] < -gap / 2).all()
    for name in ("logps", *filter(None, statistics.split(","))):
        if name == "is_top1":
            assert torch.equal(results[name], expected.is_top1)
        else:
            assert error(results[name], getattr(expected, name)) < 2e-6
    assert error(tile * (-1 / results["total"])[:, None], gradient) < 2e-6


@pytest.mark.parametrize("special", SPECIAL_ROWS)
def test_special_rows_equal_eager(special):
    """The special values are in the bias: zero times infinity would spread through a product."""
    logits, targets = special_row(special)
    hidden, weight, bias, targets = torch.randn(2, 5), torch.zeros(67, 5), logits[1], targets[1:3]
    results = call(hidden, weight, bias, targets, tile=(tile := torch.full((2, 67), torch.nan)))
    expected, gradient = exact(hidden, weight, bias, targets)
    for name in ("logps", "entropy", "mean_logits", "log_sum_sq_probs"):
        assert torch.allclose(results[name].double(), getattr(expected, name), rtol=1e-5, atol=1e-4, equal_nan=True)
    found = tile[0] / -results["total"][0]
    assert torch.allclose(found.double(), gradient[0], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not tile[1].any()


def test_a_row_with_nan_is_not_computed_again():
    """Its results are NaN. Its gradient is, too, by the factor of its tile, unless upstream is zero."""
    hidden, weight, bias, targets = inputs(4, 131, 8)
    weight[7], targets[targets == 7] = torch.nan, 8
    results = call(hidden, weight, bias, targets, tile=(tile := torch.zeros(4, 131)))
    scored = targets != -100
    assert (results["shift"][scored] == linear_exp.NO_LOGIT.value).all()  # which logits were not read again for
    for name in ("logps", "total", "entropy", "mean_logits", "log_sum_sq_probs"):
        assert results[name][scored].isnan().all()
    assert tile[scored].count_nonzero() == scored.sum()  # the targets' entries


def test_a_vocabulary_of_one():
    hidden, weight, bias = torch.randn(3, 5), torch.randn(1, 5), torch.randn(1)
    tile = torch.empty(3, 1)
    results = call(hidden, weight, bias, torch.zeros(3, dtype=torch.long), tile=tile)
    assert results["logps"].tolist() == results["entropy"].tolist() == [0, 0, 0]
    assert results["is_top1"].all()
    assert not tile.any()


def test_targets_outside_the_vocabulary_make_their_own_rows_nan():
    hidden, weight, bias, targets = inputs(4, 33, 5)
    targets[3] = 33
    tile = torch.empty(4, 33)
    results = call(hidden, weight, bias, targets, tile=tile)
    assert results["logps"].isnan().tolist() == [False, False, False, True]
    assert tile[:3].isfinite().all()


def test_ties_go_to_the_first():
    hidden, weight = torch.ones(3, 4), torch.zeros(131, 4)
    weight[[40, 100]] = 1.0
    results = call(hidden, weight, torch.zeros(131), torch.tensor([40, 100, 0]))
    assert results["is_top1"].tolist() == [True, False, False]
