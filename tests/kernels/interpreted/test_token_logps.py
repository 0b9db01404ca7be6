"""token_logps through its Triton kernels: what depends on blocks. Other checks are those of the torch path."""

import pytest
import torch

from fastdpo.accuracy import error
from fastdpo.kernels.token_logps import NORMALIZED_SUM
from fastdpo.ops import definitions, token_logps
from tests.support.ops.heads import OUTPUTS
from tests.support.ops.tokens import OPTIONS, assert_accurate, logits_and_targets, results_and_gradient

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SHAPES = {  # N, V; a block is 2048 or 4096 columns in the forward, 4096 in the backward
    "one word": (3, 1),  # only the target
    "part of a block": (5, 300),
    "whole blocks": (3, 8192),  # only the target's block needs a mask
    "blocks and a tail": (4, 8208),  # rows stay aligned for vector loads
    "odd": (4, 5003),  # rows are not aligned
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", ["plain", "all"])
def test_as_accurate_as_eager(shape, dtype, option, launches):
    assert_accurate(logits_and_targets(*SHAPES[shape], dtype), **OPTIONS[option])
    assert launches == {"token_logps_fwd": 1, "token_logps_bwd": 1}


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
    assert_accurate((torch.randn(len(targets), v), targets))


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
    buffer = torch.full((5, 6000), torch.nan)
    view = buffer[:, columns]
    logits, targets = logits_and_targets(*view.shape)
    view.copy_(logits)
    strided, contiguous = view.detach().requires_grad_(), logits.requires_grad_()
    for leaf in (strided, contiguous):
        sum(token_logps(leaf, targets, outputs=["entropy"])[:2]).sum().backward()
    assert error(token_logps(strided, targets).logps, token_logps(contiguous, targets).logps) < 1e-6
    assert error(strided.grad, contiguous.grad) < 1e-6


def test_a_row_is_bitwise_equal_in_every_batch():
    logits, targets = logits_and_targets(6, 5003)
    together = token_logps(logits, targets, outputs=OUTPUTS)
    for row in range(6):
        alone = token_logps(logits[row:].clone(), targets[row:], outputs=OUTPUTS)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


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
