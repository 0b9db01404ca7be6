"""sequence_logps and linear_sequence_logps: sums over padded and packed sequences."""

import pytest
import torch
import torch.nn.functional as F

from fastdpo.ops import definitions, linear_logps, linear_sequence_logps, sequence_logps, token_logps
from fastdpo.testing import assert_as_accurate_as, error

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TRANSFORM = dict(softcap=5.0, logit_scale=1.7, temperature=0.7)
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")

LENGTHS = {
    "one token": [1],  # the minimum
    "ragged": [5, 1, 17, 3],  # all lengths differ
    "some empty": [0, 4, 0, 0, 7, 0],  # empty sequences, also at both ends
}


def packed_inputs(lengths, dtype=torch.float32, v=37, d=16):
    """Hidden states, weight, bias, targets (some ignored) and the offsets of the sequences."""
    n = sum(lengths)
    targets = torch.randint(v, (n,))
    targets[2::5] = -100
    cu_seqlens = F.pad(torch.tensor(lengths, dtype=torch.long).cumsum(0), (1, 0))
    floats = (torch.randn(n, d), torch.randn(v, d), torch.randn(v))
    hidden, weight, bias = (x.to(dtype) for x in floats)
    return dict(hidden=hidden, weight=weight, bias=bias, targets=targets, cu_seqlens=cu_seqlens)


def results_and_gradients(op, inputs, upstream, **options):
    """The results of op, and the gradients of its floating-point inputs."""
    inputs = {name: x.detach().clone() for name, x in inputs.items()}
    leaves = [x.requires_grad_() for x in inputs.values() if x.is_floating_point()]
    results = op(**inputs, **options)
    (results.logps * upstream).sum().backward()
    return results, [leaf.grad for leaf in leaves]


def doubled(inputs):
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def assert_accurate(op, eager_op, inputs, sequences, **options):
    upstream = torch.randn(sequences)
    mine, gradients = results_and_gradients(op, inputs, upstream, **options)
    eager, eager_gradients = results_and_gradients(eager_op, inputs, upstream, **options)
    exact, exact_gradients = results_and_gradients(eager_op, doubled(inputs), upstream.double(), **options)
    assert torch.equal(mine.lengths, exact.lengths)
    assert mine.lengths.dtype == torch.int64
    assert_as_accurate_as(mine.logps, eager.logps, exact.logps)
    for gradient, of_eager, of_exact in zip(gradients, eager_gradients, exact_gradients, strict=True):
        assert_as_accurate_as(gradient, of_eager, of_exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sums_are_as_accurate_as_eager(lengths, dtype):
    lengths = LENGTHS[lengths]
    inputs = packed_inputs(lengths, dtype)
    assert_accurate(linear_sequence_logps, definitions.linear_sequence_logps, inputs, len(lengths), **TRANSFORM)
    logits = dict(logits=inputs["hidden"] @ inputs["weight"].t())
    logits.update(targets=inputs["targets"], cu_seqlens=inputs["cu_seqlens"])
    assert_accurate(sequence_logps, definitions.sequence_logps, logits, len(lengths), **TRANSFORM)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 7, 37)], ids=str)  # the minimum; several rows
def test_padded_sums_are_as_accurate_as_eager(shape, dtype):
    targets = torch.randint(shape[-1], shape[:-1])
    targets[1:, 4:] = -100
    inputs = dict(logits=(3 * torch.randn(shape)).to(dtype), targets=targets)
    assert_accurate(sequence_logps, definitions.sequence_logps, inputs, shape[0], **TRANSFORM)


def test_equals_sums_of_token_logps():
    inputs = packed_inputs([5, 1, 17, 3])
    bounds = inputs.pop("cu_seqlens")
    tokens = linear_logps(**inputs).logps
    expected = torch.stack([part.double().sum() for part in tokens.split(bounds.diff().tolist())]).float()
    assert torch.equal(linear_sequence_logps(**inputs, cu_seqlens=bounds).logps, expected)
    logits = torch.randn(3, 7, 37)
    targets = torch.randint(37, (3, 7))
    expected = token_logps(logits, targets).logps.double().sum(1).float()
    assert torch.equal(sequence_logps(logits, targets).logps, expected)


def test_long_sums_are_taken_in_float64():
    logits, targets = torch.randn(1, 20000, 2), torch.zeros(1, 20000, dtype=torch.long)
    exact = token_logps(logits, targets).logps.double().sum(1)
    assert error(sequence_logps(logits, targets).logps, exact) <= torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize("budget", [0, 1 << 20])  # no tile kept, all tiles kept: the sum must not depend on it
def test_policy_and_reference_are_bitwise_equal(budget):
    inputs = packed_inputs([5, 1, 17, 3], torch.bfloat16)
    policy, _ = results_and_gradients(linear_sequence_logps, inputs, torch.ones(4), memory_budget=budget)
    assert torch.equal(policy.logps, linear_sequence_logps(**inputs).logps)


def test_ignored_targets_have_no_effect():
    inputs = packed_inputs([5, 1, 17, 3])
    inputs["targets"][:5] = -100
    results, gradients = results_and_gradients(linear_sequence_logps, inputs, torch.ones(4))
    assert results.logps[0].item() == results.lengths[0].item() == 0
    assert not gradients[0][:5].any()
    inputs["hidden"][:5] = float("nan")
    same, same_gradients = results_and_gradients(linear_sequence_logps, inputs, torch.ones(4))
    assert torch.equal(same.logps, results.logps)
    assert all(torch.equal(a, b) for a, b in zip(same_gradients, gradients, strict=True))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=str)
def test_empty_input_is_differentiable(lengths):
    results, gradients = results_and_gradients(linear_sequence_logps, packed_inputs(lengths), torch.ones(len(lengths)))
    assert results.logps.tolist() == results.lengths.tolist() == [0] * len(lengths)
    assert not any(gradient.any() for gradient in gradients)
    padded = sequence_logps(torch.randn(len(lengths), 0, 5), torch.zeros(len(lengths), 0, dtype=torch.long))
    assert padded.logps.tolist() == [0] * len(lengths)


def test_int32_bounds_and_strided_upstream_gradients():
    inputs = packed_inputs([5, 1, 17, 3])
    expected, expected_gradients = results_and_gradients(linear_sequence_logps, inputs, torch.ones(4))
    inputs["cu_seqlens"] = inputs["cu_seqlens"].int()
    leaf = inputs["hidden"].requires_grad_()
    results = linear_sequence_logps(**inputs)
    results.logps.sum().backward()  # an expanded scalar
    assert torch.equal(results.logps, expected.logps)
    assert torch.equal(leaf.grad, expected_gradients[0])


def test_a_target_of_probability_zero_affects_only_its_sequence():
    logits = torch.zeros(2, 3, 4)
    logits[0, 1, 2] = -float("inf")
    assert sequence_logps(logits, torch.full((2, 3), 2)).logps.isinf().tolist() == [True, False]


def test_gradcheck():
    inputs = packed_inputs([2, 0, 3], torch.float64, v=7, d=3)
    fixed = dict(targets=inputs["targets"], cu_seqlens=inputs["cu_seqlens"])
    leaves = [inputs[name].requires_grad_() for name in ("hidden", "weight", "bias")]

    def linear(hidden, weight, bias):
        return linear_sequence_logps(hidden, weight, bias=bias, **fixed, **TRANSFORM).logps

    def given(logits):
        return sequence_logps(logits, **fixed, **TRANSFORM).logps

    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(linear, leaves)
        assert check(given, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_opcheck(dtype):
    bounds = torch.tensor([0, 2, 2, 5])
    values, grad = torch.randn(5, dtype=dtype), torch.randn(3, dtype=dtype)
    torch.library.opcheck(torch.ops.fastdpo.segment_sums_fwd, (values, bounds), test_utils=CHECKS)
    torch.library.opcheck(torch.ops.fastdpo.segment_sums_bwd, (grad, bounds, 5), test_utils=CHECKS)


@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize("form", ["padded", "packed", "linear"])
def test_fullgraph_compiles_for_any_number_of_tokens(form):
    torch.compiler.reset()
    op = linear_sequence_logps if form == "linear" else sequence_logps
    compiled = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([4, 9, 2], [8, 3, 12, 5, 6]):
        if form == "linear":
            inputs = packed_inputs(lengths)
        elif form == "packed":
            packed = packed_inputs(lengths)
            inputs = dict(logits=torch.randn(sum(lengths), 37))
            inputs.update(targets=packed["targets"], cu_seqlens=packed["cu_seqlens"])
        else:
            shape = (len(lengths), max(lengths))
            inputs = dict(logits=torch.randn(*shape, 37), targets=torch.randint(37, shape))
        upstream = torch.randn(len(lengths))
        results, gradients = results_and_gradients(compiled, inputs, upstream)
        expected, expected_gradients = results_and_gradients(op, inputs, upstream)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected_gradients, strict=True))


def test_autocast_changes_only_the_matrix_product():
    inputs = packed_inputs([5, 1, 17, 3])
    rounded = {name: x.bfloat16().float() if x.is_floating_point() else x for name, x in inputs.items()}
    exact = definitions.linear_sequence_logps(**doubled(rounded)).logps
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        mine = linear_sequence_logps(**inputs).logps
        eager = definitions.linear_sequence_logps(**inputs).logps
    assert mine.dtype == torch.float32
    assert_as_accurate_as(mine, eager, exact)
