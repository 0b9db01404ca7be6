"""token_logps through its Triton kernels: the checks of the torch path, and kernel-specific cases."""

import pytest
import torch

from fastdpo.kernels.token_logps import NORMALIZED_SUM
from fastdpo.ops import definitions, token_logps
from fastdpo.ops.head.results import STATISTICS
from fastdpo.testing import assert_as_accurate_as, error
from tests.support.ops.heads import OUTPUTS, REAL_OUTPUTS, Dropped
from tests.support.ops.special_rows import SPECIAL_ROWS, assert_special_row, special_row

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SHAPES = {  # N, V; a block is 2048 or 4096 columns in the forward, 4096 in the backward
    "one word": (3, 1),  # only the target
    "part of a block": (5, 300),
    "whole blocks": (3, 8192),  # only the target's block needs a mask
    "blocks and a tail": (4, 8208),  # rows stay aligned for vector loads
    "odd": (4, 5003),  # rows are not aligned
}
OPTIONS = {
    "plain": {},  # no multiplication
    "scale": dict(logit_scale=1.7, temperature=0.7),  # one factor
    "negative scale": dict(logit_scale=-0.5),  # values outside of a row must not become +inf
    "softcap": dict(softcap=5.0, logit_scale=1.7, temperature=0.7),
}


def logits_and_targets(n, v, dtype=torch.float32):
    """Logits with a confident prediction in every third row.

    Targets include the last vocabulary entry and -100.
    """
    logits, targets = 3 * torch.randn(n, v), torch.randint(v, (n,))
    targets[0] = v - 1
    logits[torch.arange(0, n, 3), targets[::3]] += 9
    if n > 1:
        targets[1] = -100
    return logits.to(dtype), targets


def results_and_gradient(op, logits, targets, upstream, **options):
    """Results, and the gradient of `sum(upstream * (logps, entropy))`.

    Terms with an upstream of None are left out.
    """
    leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    results = op(leaf, targets, outputs=OUTPUTS, **options)
    pairs = zip((results.logps, results.entropy), upstream, strict=True)
    sum((value * g).sum() for value, g in pairs if g is not None).backward()
    return results, leaf.grad


def assert_accurate(logits, targets, differentiate=(True, True), **options):
    upstream = [torch.randn(len(targets)) if wanted else None for wanted in differentiate]
    wide = [None if g is None else g.double() for g in upstream]
    mine, my_gradient = results_and_gradient(token_logps, logits, targets, upstream, **options)
    eager, eager_gradient = results_and_gradient(definitions.token_logps, logits, targets, upstream, **options)
    exact, gradient = results_and_gradient(definitions.token_logps, logits.double(), targets, wide, **options)
    assert my_gradient.dtype == logits.dtype
    assert torch.equal(mine.is_top1, exact.is_top1)
    assert_as_accurate_as(my_gradient, eager_gradient, gradient)
    for name in REAL_OUTPUTS:
        assert getattr(mine, name).dtype == torch.float32
        assert_as_accurate_as(getattr(mine, name), getattr(eager, name), getattr(exact, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_accurate_as_eager(shape, dtype, launches):
    assert_accurate(*logits_and_targets(*SHAPES[shape], dtype))
    assert launches == {"token_logps_fwd": 1, "token_logps_bwd": 1}


@pytest.mark.parametrize("v", [5003, 8208])
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_is_as_accurate_as_eager(option, v):
    assert_accurate(*logits_and_targets(3, v), **OPTIONS[option])


@pytest.mark.parametrize("differentiate", [(True, False), (False, True)], ids=("logps", "entropy"))
@pytest.mark.parametrize("option", ["plain", "softcap"])
def test_gradients_of_one_output_alone(differentiate, option):
    assert_accurate(*logits_and_targets(4, 5003), differentiate, **OPTIONS[option])


@pytest.mark.parametrize("outputs", [(), *((name,) for name in STATISTICS)], ids=str)
def test_statistics_do_not_depend_on_each_other(outputs):
    logits, targets = logits_and_targets(4, 5003)
    everything, alone = (token_logps(logits, targets, outputs=names) for names in (OUTPUTS, outputs))
    for name in OUTPUTS:
        value = getattr(alone, name)
        assert (value is None) == (name not in (*outputs, "logps"))
        assert value is None or torch.equal(value, getattr(everything, name))


@pytest.mark.parametrize("option", ["plain", "softcap"])
def test_sums_are_normalized(option):
    options = {"softcap": None, "logit_scale": 1.0, "temperature": 1.0, **OPTIONS[option]}
    logits, targets = logits_and_targets(6, 5003)
    scored = targets != -100
    _, *sums = torch.ops.fastdpo.token_logps_fwd(logits, targets, *options.values(), "")
    z = logits[scored].double() * options["logit_scale"]
    if options["softcap"] is not None:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    z = z / options["temperature"]
    t = z.gather(1, targets[scored, None])[:, 0]
    shift, others, total = (x[scored].double() for x in sums)
    exact = (z - shift[:, None]).exp().scatter(1, targets[scored, None], 0).sum(1)
    assert others.allclose(exact, rtol=2e-6)
    assert total.allclose(exact + (t - shift).exp(), rtol=2e-6)
    assert others.allclose(torch.full_like(others, NORMALIZED_SUM.value), rtol=1e-5)


def test_targets_around_every_block_boundary():
    v = 3 * 4096 + 7
    targets = torch.tensor([0, 1, 2047, 2048, 4095, 4096, 8191, 8192, 3 * 4096 - 1, 3 * 4096, v - 1])
    assert_accurate(torch.randn(len(targets), v), targets)


@pytest.mark.parametrize("v", [5003, 8208])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top1_of_ties_is_the_first(v, dtype):
    logits = torch.zeros(8, v, dtype=dtype)
    first, second = 2049, 4999
    logits[:4, first] = logits[:4, second] = 1  # a tie across blocks
    logits[4:6, first] = logits[4:6, first + 1] = 1  # a tie within a lane
    targets = torch.tensor(
        [first, second, 0, v - 1, first, first + 1, 0, v - 1]
    )  # in the last two rows, all logits are equal
    is_top1 = token_logps(logits, targets, outputs=["is_top1"]).is_top1
    assert is_top1.tolist() == [True, False, False, False, True, False, True, False]
    assert torch.equal(is_top1, logits.argmax(-1) == targets)


@pytest.mark.parametrize("garbage", [INF, -INF, NAN], ids=str)
def test_ignored_rows_are_exactly_zero_next_to_any_value(garbage):
    logits, targets = logits_and_targets(4, 5003)
    logits[1, ::7], logits[2] = garbage, garbage
    targets[2] = -100
    upstream = torch.randn(2, 4)
    upstream[:, 2] = garbage
    results, gradient = results_and_gradient(token_logps, logits, targets, upstream)
    assert not any(value[1:3].any() for value in results)
    assert not gradient[1:3].any()
    assert all(value.isfinite().all() for value in (*results, gradient))
    assert gradient[[0, 3]].any(1).all()


def test_vocabulary_columns_at_minus_infinity():
    logits, targets = logits_and_targets(5, 8208)
    logits[:, 4000:] = -INF  # some blocks have no finite logit
    logits[:, :9] = -INF
    targets[targets >= 0] = 100
    upstream = torch.randn(2, 5)
    mine, my_gradient = results_and_gradient(token_logps, logits, targets, upstream)
    kept = logits[:, 9:4000]
    exact, gradient = results_and_gradient(definitions.token_logps, kept.double(), targets - 9, upstream.double())
    for name in ("logps", "entropy", "log_sum_sq_probs"):
        scored = targets >= 0
        assert error(getattr(mine, name)[scored], getattr(exact, name)[scored]) < 1e-6
    assert error(my_gradient[scored, 9:4000], gradient[scored]) < 1e-6
    assert not my_gradient[:, :9].any()
    assert not my_gradient[:, 4000:].any()
    assert torch.equal(mine.mean_logits, torch.where(scored, -INF, 0.0))


def test_a_target_of_probability_one():
    logits = torch.full((2, 5003), -INF)
    targets = torch.tensor([3, 5000])
    logits[[0, 1], targets] = torch.tensor([2.0, -700.0])
    results, gradient = results_and_gradient(token_logps, logits, targets, torch.randn(2, 2))
    assert results.logps.tolist() == results.entropy.tolist() == results.log_sum_sq_probs.tolist() == [0, 0]
    assert results.is_top1.all()
    assert not gradient.any()


def test_a_target_of_probability_zero():
    logits, targets = logits_and_targets(1, 5003)
    logits[0, targets[0]] = -INF
    results, gradient = results_and_gradient(token_logps, logits, targets, (torch.ones(1), None))
    assert results.logps.item() == -INF
    others = logits.double().softmax(-1)
    assert error(gradient, torch.zeros_like(others).scatter(1, targets[:, None], 1) - others) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", SPECIAL_ROWS)
def test_special_rows_equal_eager(special, dtype):
    assert_special_row(*special_row(special, dtype, 5003))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", [-300, 300])
def test_a_gap_of_300_nats(gap, dtype):
    logits, targets = torch.randn(3, 5003).to(dtype), torch.tensor([0, 2500, 5002])
    logits[torch.arange(3), targets] = gap
    upstream = torch.randn(2, 3)
    mine, my_gradient = results_and_gradient(token_logps, logits, targets, upstream)
    exact, gradient = results_and_gradient(definitions.token_logps, logits.double(), targets, upstream.double())
    if gap < 0:
        assert error(mine.logps, exact.logps) < 1e-6
        assert error(my_gradient, gradient) < 2e-6 + torch.finfo(dtype).eps
    else:  # e^-300 underflows in float32
        assert not mine.logps.any()
        assert not my_gradient.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", [-1000.0, 1000.0])
def test_large_logits(level, dtype):
    logits, targets = logits_and_targets(4, 5003, dtype)
    assert_accurate(logits + level, targets)


def test_confident_predictions_are_accurate():
    logits, targets = torch.randn(8, 5003), torch.randint(5003, (8,))
    logits[torch.arange(8), targets] = torch.linspace(16, 24, 8)  # beyond that, the float64 reference loses digits
    upstream = torch.ones(2, 8)
    mine, my_gradient = results_and_gradient(token_logps, logits, targets, upstream)
    exact, gradient = results_and_gradient(definitions.token_logps, logits.double(), targets, upstream.double())
    assert (exact.logps > -1e-3).all()
    for row in range(8):  # a norm over rows would only reflect the least confident one
        assert error(mine.logps[row], exact.logps[row]) < 4e-6
        assert error(my_gradient[row], gradient[row]) < 4e-6
        assert error(mine.entropy[row], exact.entropy[row]) < 4e-6


@pytest.mark.parametrize("columns", [slice(0, 5003), slice(3, 5006), slice(16, 4112)], ids=str)
def test_rows_with_gaps_between_them(columns):
    buffer = torch.full((5, 6000), NAN)
    view = buffer[:, columns]
    logits, targets = logits_and_targets(*view.shape)
    view.copy_(logits)
    strided, contiguous = view.detach().requires_grad_(), logits.requires_grad_()
    for leaf in (strided, contiguous):
        sum(token_logps(leaf, targets, outputs=["entropy"])[:2]).sum().backward()
    assert error(token_logps(strided, targets).logps, token_logps(contiguous, targets).logps) < 1e-6
    assert error(strided.grad, contiguous.grad) < 1e-6


def test_strided_targets_and_upstream_gradients():
    logits, targets = logits_and_targets(4, 300)
    interleaved = torch.stack((targets, torch.zeros_like(targets)), 1)[:, 0]
    assert torch.equal(token_logps(logits, interleaved).logps, token_logps(logits, targets).logps)
    leaf = logits.requires_grad_()
    token_logps(leaf, interleaved.int()).logps.sum().backward()  # an expanded gradient
    exact = torch.zeros(4, 300).scatter(1, targets.clamp(min=0)[:, None], 1) - logits.softmax(-1)
    assert error(leaf.grad, exact.detach() * (targets >= 0)[:, None]) < 1e-6


def test_an_empty_batch(launches):
    logits = torch.zeros(0, 300, requires_grad=True)
    results = token_logps(logits, torch.zeros(0, dtype=torch.long), outputs=OUTPUTS)
    results.logps.sum().backward()
    assert [len(value) for value in results] == [0] * len(OUTPUTS)
    assert logits.grad.shape == (0, 300)
    assert launches["token_logps_fwd"] == 1


def test_a_row_is_bitwise_equal_in_every_batch():
    logits, targets = logits_and_targets(6, 5003)
    together = token_logps(logits, targets, outputs=OUTPUTS)
    for row in range(6):
        alone = token_logps(logits[row:].clone(), targets[row:], outputs=OUTPUTS)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_targets_outside_the_vocabulary_make_their_rows_nan():
    logits, targets = logits_and_targets(4, 300)
    targets[2:] = torch.tensor([300, -1])
    results, gradient = results_and_gradient(token_logps, logits, targets, torch.randn(2, 4))
    assert results.logps.isnan().tolist() == gradient.isnan().all(1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("target", [300, -1, 2**32 + 5, -(2**32) + 5])
@pytest.mark.parametrize("differentiate", [(True, False), (False, True), (True, True)], ids=str)
def test_targets_outside_the_vocabulary_keep_gradients_of_zero(differentiate, target):
    logits, targets = logits_and_targets(4, 300)
    targets[2:] = target
    upstream = [torch.randn(4) if wanted else None for wanted in differentiate]
    for g in upstream:
        if g is not None:
            g[3] = 0
    results, gradient = results_and_gradient(token_logps, logits, targets, upstream)
    assert results.logps.isnan().tolist() == results.entropy.isnan().tolist() == [False, False, True, True]
    assert not results.is_top1[2:].any()
    assert gradient[2].isnan().all()
    assert not gradient[3].any()


def test_missing_upstream_gradients_give_no_gradient():
    leaf, targets = logits_and_targets(4, 300)
    results = token_logps(leaf.requires_grad_(), targets, outputs=OUTPUTS)
    Dropped.apply(results.logps, results.entropy).backward()
    assert leaf.grad is None or not leaf.grad.any()
    _, *sums = torch.ops.fastdpo.token_logps_fwd(leaf, targets, None, 1.0, 1.0, "")
    assert not torch.ops.fastdpo.token_logps_bwd(None, None, leaf, targets, sums, None, 1.0, 1.0).any()


def test_unsupported_inputs_use_torch(launches):
    logits, targets = logits_and_targets(4, 300)
    exact = definitions.token_logps(logits.double(), targets).logps
    for other in (logits.double(), logits.t().contiguous().t()):  # float64 sums; a last stride other than 1
        leaf = other.detach().requires_grad_()
        logps = token_logps(leaf, targets).logps
        logps.sum().backward()
        assert error(logps, exact) < 1e-6
        assert leaf.grad.isfinite().all()
    assert launches == {"token_logps_fwd": 0, "token_logps_bwd": 0}
