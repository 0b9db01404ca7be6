"""The kernels, compiled for NVIDIA architectures and executed on the CPU."""

from functools import partial, partialmethod

import pytest
import torch
import triton
import triton.language as tl

from fastdpo.accuracy import error
from fastdpo.kernels.gather_keys import gather_keys_bwd, gather_keys_fwd
from fastdpo.kernels.linear_logps import target_logits
from fastdpo.kernels.logit_math import tanh
from fastdpo.kernels.token_logps import token_logps_fwd
from fastdpo.ops import definitions, packed_attention, token_logps
from fastdpo.ops.attention import trials as attention_trials
from fastdpo.ops.attention.device_layout import rows_of
from fastdpo.ops.attention.flash import varlen_layout
from fastdpo.ops.attention.triton_backend import TritonBackend
from fastdpo.ops.choice import verdicts
from fastdpo.ops.head import trials as head_trials
from fastdpo.ops.head.results import Transform
from tests.support.accuracy import assert_as_accurate_as
from tests.support.ops.heads import OUTPUTS, REAL_OUTPUTS

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
# A prefix with two branches, a row that ends with a partial block, and one of a single token.
ROWS = torch.tensor([[0, 0, 0, 70], [0, 70, 70, 33], [0, 66, 103, 90], [193, 0, 193, 5], [198, 0, 198, 1]])
ROWS = ROWS.to(torch.int32)
TOKENS = int(ROWS[-1, 2:].sum())


def gradients(op, tensors, grad, **options):
    """The result of an op and the gradients of its tensors."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    result = op(*leaves, **options)
    first = result if isinstance(result, torch.Tensor) else result[0]
    return result, torch.autograd.grad(first, leaves, grad.to(first.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [4099, 8192])  # not aligned and several blocks, and aligned
def test_token_logps(vocabulary, dtype, launches):
    logits, grad = (1 + torch.randn(3, vocabulary)).to(dtype), torch.randn(3)
    targets = torch.tensor([vocabulary - 1, -100, 5])
    options = dict(targets=targets, softcap=20.0, outputs=OUTPUTS)
    (mine, mine_grad), (eager, eager_grad) = (
        gradients(op, [logits], grad, **options) for op in (token_logps, definitions.token_logps)
    )
    exact, exact_grad = gradients(definitions.token_logps, [logits.double()], grad, **options)
    assert launches == ["_token_logps_fwd_kernel", "_token_logps_bwd_kernel"]
    for name in REAL_OUTPUTS:
        assert_as_accurate_as(*(getattr(x, name) for x in (mine, eager, exact)))
    assert torch.equal(mine.is_top1, exact.is_top1)
    assert_as_accurate_as(mine_grad[0], eager_grad[0], exact_grad[0])


@pytest.mark.parametrize("vocabulary", [20_003, 16_384])  # not aligned and several blocks, and aligned
def test_rows_by_32_warps(vocabulary, launches):
    logits, targets = (1 + torch.randn(2, vocabulary)).bfloat16(), torch.tensor([vocabulary - 1, 3])
    tiles = [torch.empty_like(logits) for _ in range(2)]
    (whole, few) = (
        token_logps_fwd(logits, targets, 20.0, 1.0, 1.0, "entropy", None, tile, warps)
        for tile, warps in zip(tiles, (32, 8), strict=True)
    )
    for mine, other in zip(whole, few, strict=True):
        assert error(mine, other) < 1e-6
    assert error(*tiles) < 1e-3  # some entries round to the other side


@triton.jit
def _tanh_kernel(out_ptr, x_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out_ptr + index, tanh(tl.load(x_ptr + index)))


def test_tanh(launches):
    """To a few roundings, relative to each value."""
    x = torch.logspace(-8, 2, 512)
    x = torch.cat([x, -x])
    _tanh_kernel[(1,)](out := torch.empty(1024), x, N=1024, enable_fp_fusion=True)
    exact = x.double().tanh()
    assert ((out - exact) / exact).abs().max() < 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("options", [dict(), dict(window=40, softcap=15.0, sinks=True)], ids=["plain", "options"])
@pytest.mark.parametrize("d", [64, 128])
def test_packed_attention(d, options, launches, monkeypatch):
    """With options, each reader of the keys of the prefix has a program of its own."""
    names = [
        "_packed_attention_fwd_kernel",
        "_packed_attention_dq_kernel",
        "_packed_attention_dkv_kernel",
    ]
    if options:
        monkeypatch.setattr(TritonBackend, "call", partialmethod(TritonBackend.call, least_turns=1))
        names.append("_sum_places_kernel")
    options = {**options, "sinks": torch.randn(4)} if "sinks" in options else options
    tensors = [torch.randn(TOKENS, h, d).bfloat16() for h in (4, 2, 2)]
    grad = torch.randn(TOKENS, 4, d)
    mine, eager = (
        gradients(op, tensors, grad, rows=ROWS, **options) for op in (packed_attention, definitions.packed_attention)
    )
    exact = gradients(definitions.packed_attention, [x.double() for x in tensors], grad, rows=ROWS, **options)
    assert launches == names
    for x, eager_x, exact_x in zip((mine[0], *mine[1]), (eager[0], *eager[1]), (exact[0], *exact[1]), strict=True):
        assert_as_accurate_as(x, eager_x, exact_x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_keys(dtype, launches):
    places = varlen_layout(rows_of(ROWS, TOKENS)).places
    key, value = torch.randn(2, TOKENS, 24).transpose(0, 1).to(dtype), torch.randn(TOKENS, 2, 64).to(dtype)
    placed = gather_keys_fwd(key, value, places.index)
    assert all(torch.equal(x, of[places.index]) for x, of in zip(placed, (key, value), strict=True))
    grads = [torch.randn_like(x) for x in placed]
    summed = gather_keys_bwd(*grads, places.readers, places.first_reader)
    for x, grad, of in zip(summed, grads, (key, value), strict=True):
        exact = torch.zeros(of.shape, dtype=torch.float64).index_add_(0, places.index.long(), grad.double())
        assert error(x, exact) < torch.finfo(dtype).eps
    assert launches == ["_gather_keys_fwd_kernel", "_sum_places_kernel"]


@pytest.mark.parametrize("transform", [(None, 1.0, 1.0), (5.0, 1.7, 0.7)], ids=["plain", "capped"])
@pytest.mark.parametrize("shape", [(150, 300, 72), (40, 131, 128)], ids=str)
def test_target_logits(shape, transform, launches):
    n, vocabulary, d = shape
    hidden, weight, bias = (
        x.bfloat16() for x in (torch.randn(n, d) / 2, torch.randn(vocabulary, d), torch.randn(vocabulary))
    )
    targets = torch.randint(vocabulary, (n,))
    targets[0] = vocabulary - 1
    logits = torch.linalg.vecdot(hidden.double(), weight[targets].double()) + bias[targets]
    found = target_logits(hidden, weight, bias, targets, *transform)
    assert error(found, Transform(*transform).apply_(logits)) < 4e-6
    assert launches == ["_target_logits_kernel"]


TRIALS = {
    **head_trials.OF_LOGITS,
    "attention": partial(
        attention_trials.packed_attention,
        partial(TritonBackend().call, least_turns=1),
        d=16,
        d_v=16,
        heads=2,
        key_heads=1,
    ),
}


@pytest.mark.parametrize("name", TRIALS)
def test_kernels_pass_their_trials(name, launches):
    assert verdicts.outcome(TRIALS[name], CPU, torch.bfloat16) is None
    assert launches
