"""linear_logps: equal forwards in every mode, extreme logits, bounded memory. `test_contract.py` has the rest."""

import pytest
import torch
import torch.nn.functional as F

from fastdpo.accuracy import error
from fastdpo.ops import definitions, linear_logps
from fastdpo.ops.head.passes import TileFormat
from tests.support.accuracy import assert_as_accurate_as
from tests.support.ops.heads import (
    LEAVES,
    MODES,
    OPTIONS,
    OUTPUTS,
    REAL_OUTPUTS,
    doubled,
    head_inputs,
    results_and_gradients,
)
from tests.support.ops.special_rows import special_row

INF = float("inf")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

OVERFLOWS = (
    "an infinite target",
    "an infinite other",
    "an infinite target and other",
    "an infinite target among the impossible",
    "an impossible target",
    "nothing possible",
)


@pytest.fixture
def mode(rows_of_a_tile):
    """Sets tiles of eight rows.

    Returns a mode's gradients and memory budget, for a vocabulary of 131.
    """

    def arguments(name, dtype):
        rows_of_a_tile(8, 131, dtype)
        needs, rows = MODES[name]
        tiles = TileFormat.of(torch.empty(131, 24), dtype)
        return dict(needs=needs, memory_budget=rows * tiles.columns * tiles.dtype.itemsize)

    return arguments


@pytest.mark.parametrize("name", ["frozen", "kept", "some kept", "recomputed"])
@pytest.mark.parametrize("special", OVERFLOWS)
def test_each_mode_propagates_overflows(special, name, mode):
    """Hidden states are multiples of unit vectors, so columns of the weight determine the logits."""
    logits, targets = special_row(special, columns=131)
    hidden, weight = 1e30 * torch.eye(4, 24), torch.zeros(131, 24)
    weight[:, :4] = logits.t().clamp(-1e30, 1e30)
    weight[:, :4] /= torch.where(logits.t().isinf(), 1, 1e30)
    inputs = {"hidden": hidden, "weight": weight, "bias": None, "targets": targets}
    options = {**mode(name, torch.float32), "outputs": REAL_OUTPUTS}
    results, gradients = results_and_gradients(linear_logps, inputs, **options)
    options.pop("memory_budget")
    expected, eager_gradients = results_and_gradients(definitions.linear_logps, inputs, **options)
    for value, e in zip(results, expected, strict=True):
        assert value is e is None or torch.allclose(value, e, rtol=1e-5, atol=1e-4, equal_nan=True)
    scored = targets != -100
    assert torch.equal(gradients["hidden"][scored].isnan(), eager_gradients["hidden"][scored].isnan())
    assert not gradients["hidden"][~scored].any()
    if "weight" in gradients:
        assert gradients["weight"].isnan().all() or special == "an impossible target"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", ["plain", "all"])
def test_forward_is_bitwise_equal_in_all_modes(option, dtype, mode):
    inputs = head_inputs(37, 131, 24, dtype)
    expected, _ = results_and_gradients(linear_logps, inputs, **mode("nothing", dtype), **OPTIONS[option])
    for name in MODES:
        results, _ = results_and_gradients(linear_logps, inputs, **mode(name, dtype), **OPTIONS[option])
        assert all(torch.equal(value, e) for value, e in zip(results, expected, strict=True)), name
        bare, _ = results_and_gradients(
            linear_logps, inputs, **mode(name, dtype), **OPTIONS[option], outputs=("logps",)
        )
        assert torch.equal(bare.logps, expected.logps), name


def test_no_grad_keeps_no_tiles(mode, trace):
    inputs = head_inputs(37, 131, 24)
    budget = mode("kept", torch.float32)["memory_budget"]
    leaves = {name: inputs[name].requires_grad_() for name in LEAVES}
    with torch.no_grad():
        logps, record = trace(lambda: linear_logps(**leaves, targets=inputs["targets"], memory_budget=budget).logps)
    assert not logps.requires_grad
    assert record.left < 37 * 131
    with torch.enable_grad():
        assert torch.equal(logps, linear_logps(**leaves, targets=inputs["targets"], memory_budget=budget).logps)


def test_the_error_of_the_weights_gradient_does_not_grow_with_the_number_of_tiles(rows_of_a_tile):
    inputs, upstream = head_inputs(512, 67, 24, torch.bfloat16), torch.ones(2, 512)
    _, exact = results_and_gradients(definitions.linear_logps, doubled(inputs), upstream.double())
    errors = []
    for rows in (512, 2):
        rows_of_a_tile(rows, 67, torch.bfloat16)
        _, gradients = results_and_gradients(linear_logps, inputs, upstream, memory_budget=0)
        errors.append(error(gradients["weight"], exact["weight"]))
    assert errors[1] < 1.1 * errors[0]


def test_the_targets_logit_is_not_rounded():
    """The rounding of target logits is the main error in sums over confident tokens."""
    weight, targets = 8 * F.normalize(torch.randn(131, 64)), torch.randint(131, (8, 256))
    hidden = 0.14 * weight[targets] + 0.02 * torch.randn(8, 256, 64)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = definitions.linear_logps(hidden.double(), weight.double(), targets).logps
    assert 0.9 < exact.exp().mean() < 0.99
    mine = torch.stack([linear_logps(h, weight, y).logps for h, y in zip(hidden, targets, strict=True)])
    eager = definitions.linear_logps(hidden, weight, targets).logps
    rms_mine, rms_eager = ((x.double().sum(1) - exact.sum(1)).square().mean().sqrt() for x in (mine, eager))
    assert rms_mine < rms_eager / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("differentiate", [("logps",), ("logps", "entropy")], ids=str)
@pytest.mark.parametrize("name", ["frozen", "kept", "recomputed"])
def test_each_mode_with_targets_outside_the_vocabulary(name, differentiate, dtype, mode, unchecked_targets):
    """With an upstream gradient of zero, they do not contribute to the gradient of the weight."""
    inputs, upstream = head_inputs(37, 131, 24, dtype), torch.randn(2, 37)
    outside, rest = [2, 20, 36], [i for i in range(37) if i not in (2, 20, 36)]
    upstream[:, outside] = 0
    options = {**mode(name, dtype), "differentiate": differentiate}
    options |= {"outputs": ("entropy",)} if "entropy" in differentiate else {"outputs": ("logps",)}
    inputs["targets"][outside] = 7
    expected, clean = results_and_gradients(linear_logps, inputs, upstream, **options)
    inputs["targets"][outside] = torch.tensor([131, -1, 2**32 + 7])
    results, gradients = results_and_gradients(linear_logps, inputs, upstream, **options)
    assert results.logps[outside].isnan().all()
    assert torch.equal(results.logps[rest], expected.logps[rest])
    for leaf, gradient in gradients.items():
        assert error(gradient, clean[leaf]) < 1e-6
    upstream[:, 20] = 1
    _, gradients = results_and_gradients(linear_logps, inputs, upstream, **options)
    assert all(gradient.isnan().any() for gradient in gradients.values())


@pytest.mark.parametrize("name", ["kept", "some kept"])
def test_kept_tiles_are_not_saved_tensors(name, mode):
    """Hooks on saved tensors, such as activation offloading, must not see the tiles."""
    inputs, options = head_inputs(37, 131, 24), mode(name, torch.float32)
    leaves = {leaf: inputs[leaf].requires_grad_() for leaf in options.pop("needs")}
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x.clone(), lambda x: x):
        logps = linear_logps(**leaves, targets=inputs["targets"], **options).logps
    assert torch.Size([131, 24]) in seen
    assert all(shape[1:] in ((), (24,)) for shape in seen)
    logps.sum().backward()
    found = {leaf: x.grad for leaf, x in leaves.items()}
    for x in leaves.values():
        x.grad = None
    linear_logps(**leaves, targets=inputs["targets"], **options).logps.sum().backward()
    assert all(torch.equal(x.grad, found[leaf]) for leaf, x in leaves.items())


def test_kept_tiles_are_freed_by_the_backward(mode, trace):
    inputs, options = head_inputs(37, 131, 24), mode("kept", torch.float32)
    leaves = {leaf: inputs[leaf].requires_grad_() for leaf in options.pop("needs")}
    tiles = min(37 * 131 * 4, options["memory_budget"])
    logps, forward = trace(lambda: linear_logps(**leaves, targets=inputs["targets"], **options).logps)
    assert forward.left > tiles
    gradients = sum(x.nbytes for x in leaves.values())
    _, again = trace(lambda: logps.sum().backward(retain_graph=True))
    assert again.left >= gradients - 64
    _, last = trace(lambda: logps.sum().backward())
    assert last.left <= -tiles
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        logps.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["frozen", "kept", "recomputed"])
def test_confident_predictions_keep_their_gradient(name, dtype, mode):
    weight, targets = 8 * F.normalize(torch.randn(131, 64)), torch.randint(131, (37,))
    hidden = weight[targets] / 4 + 0.02 * torch.randn(
        37, 64
    )  # the target's logit is 16 nats above the mean of the others
    inputs = dict(hidden=hidden.to(dtype), weight=weight.to(dtype), bias=None, targets=targets)
    _, gradients = results_and_gradients(linear_logps, inputs, **mode(name, dtype))
    _, eager = results_and_gradients(definitions.linear_logps, inputs, needs=gradients.keys())
    _, exact = results_and_gradients(definitions.linear_logps, doubled(inputs), needs=gradients.keys())

    p = F.linear(inputs["hidden"].double(), inputs["weight"].double()).softmax(-1)
    assert p.gather(1, targets[:, None]).min() > 0.999
    from_probabilities = (F.one_hot(targets, 131) - p.to(dtype)).double() @ inputs["weight"].double()
    assert error(from_probabilities, exact["hidden"]) > 0.2  # the error of a tile of rounded probabilities
    for leaf, gradient in gradients.items():
        assert_as_accurate_as(gradient, eager[leaf], exact[leaf])
        assert error(gradient, exact[leaf]) < 0.02


@pytest.mark.parametrize("name", ["frozen", "kept", "recomputed"])
def test_float16_supports_a_vocabulary_larger_than_its_range(name, mode):
    v = 70000  # for equal logits the sum over the other entries, part of the gradient tile, exceeds 65504
    weight = torch.ones(v, 1).index_fill(0, torch.tensor([0]), 3).half()
    inputs = dict(hidden=torch.zeros(2, 1).half(), weight=weight, bias=None, targets=torch.tensor([0, -100]))
    _, gradients = results_and_gradients(linear_logps, inputs, **mode(name, torch.float16))
    _, exact = results_and_gradients(definitions.linear_logps, doubled(inputs), needs=gradients.keys())
    assert error(gradients["hidden"], exact["hidden"]) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_head_with_a_low_rank_adapter(dtype):
    """`[h, s h A^T] [W, B]^T = h (W + s B A)^T`: results, and gradients of h, A and B."""
    n, v, d, rank, scale = 23, 101, 16, 3, 0.5
    h, w, a, b = (torch.randn(size) for size in ((n, d), (v, d), (rank, d), (v, rank)))
    targets, grad = torch.randint(v, (n,)), torch.randn(n)

    def run(dtype, adapted):
        leaves = [x.to(dtype).requires_grad_() for x in (h, a, b)]
        logps = adapted(*leaves, w.to(dtype))
        return logps, *torch.autograd.grad(logps, leaves, grad.to(logps.dtype))

    def augmented(h, a, b, w):
        return linear_logps(torch.cat([h, scale * h @ a.T], 1), torch.cat([w, b], 1), targets).logps

    def merged(h, a, b, w):
        return definitions.linear_logps(h, w + scale * b @ a, targets).logps

    for x, eager, exact in zip(run(dtype, augmented), run(dtype, merged), run(torch.float64, merged), strict=True):
        assert_as_accurate_as(x, eager, exact, dtype)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [("nothing", 1, 0), ("frozen", 2, 0), ("kept", 1, 2), ("weight alone", 1, 1), ("recomputed", 1, 3)],
)
def test_number_of_products(name, forward, backward, mode, trace):
    options = mode(name, torch.float32)
    inputs = head_inputs(8, 131, 24)  # one tile
    leaves = {leaf: inputs[leaf].requires_grad_(leaf in options["needs"]) for leaf in LEAVES if leaf != "bias"}
    targets, budget = inputs["targets"], options["memory_budget"]
    results, record = trace(lambda: linear_logps(**leaves, targets=targets, memory_budget=budget))
    assert record.products == forward
    if options["needs"]:
        _, record = trace(lambda: results.logps.sum().backward())
        assert record.products == backward


@pytest.mark.parametrize("name", ["nothing", "frozen", "kept", "recomputed"])
def test_autocast_multiplies_in_its_dtype(name, mode, trace):
    options, inputs = mode(name, torch.bfloat16), head_inputs(37, 131, 24)
    leaves = {leaf: inputs[leaf].requires_grad_(leaf in options["needs"]) for leaf in LEAVES}
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        results, record = trace(lambda: linear_logps(**leaves, targets=inputs["targets"]))
    assert record.product_dtypes == {"c10::BFloat16"}
    if name != "nothing":  # a frozen head formed this gradient in the forward
        _, record = trace(lambda: results.logps.sum().backward())
        assert name == "frozen" or "c10::BFloat16" in record.product_dtypes


N, V, D, ROWS = 64, 8192, 16, 4  # sizes of the memory tests: a tile of logits takes 128 KiB, all logits take 2 MiB
TILE = ROWS * V * 4
BLOCK = V * 4  # passes are made over one row at a time
SMALL = N * (8 * D + 64) * 4  # allows for some tensors of hidden states, results and sums


def scratch_of_products(dtype: torch.dtype, trace) -> int:
    """Bytes that the BLAS library allocates for the products with a tile, none on many processors."""
    hidden, weight, tile = (torch.ones(shape, dtype=dtype) for shape in ((ROWS, D), (V, D), (ROWS, V)))
    forward, back = torch.empty_like(tile), torch.empty_like(hidden)
    products = (lambda: torch.mm(hidden, weight.t(), out=forward)), (lambda: torch.mm(tile, weight, out=back))
    return max(trace(product)[1].largest for product in products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", ["plain", "softcap"])
@pytest.mark.parametrize("outputs", [("logps",), OUTPUTS], ids=["logps", "everything"])
@pytest.mark.parametrize(
    ("needs", "budget_rows", "kept_rows"),
    [
        (("hidden",), 1000, 0),  # a frozen head keeps no tile
        (("hidden", "weight"), 0, 0),  # nothing fits
        (("hidden", "weight"), 21, 20),  # whole tiles that fit
        (("hidden", "weight"), 1000, N),  # all tiles fit
    ],
)
def test_memory_is_tiles_and_the_budget(needs, budget_rows, kept_rows, outputs, option, dtype, trace, rows_of_a_tile):
    rows_of_a_tile(ROWS, V, dtype)
    scratch = scratch_of_products(dtype, trace)
    tiles = ROWS * V * dtype.itemsize + 7 * BLOCK + scratch
    inputs = {**head_inputs(N, V, D, dtype), "bias": None}
    for name in needs:
        inputs[name].requires_grad_()
    budget = budget_rows * V * dtype.itemsize
    kept = kept_rows * V * dtype.itemsize

    results, forward = trace(lambda: linear_logps(**inputs, outputs=outputs, memory_budget=budget, **OPTIONS[option]))
    assert kept <= forward.left <= kept + SMALL
    assert forward.peak <= kept + tiles + SMALL
    assert forward.largest <= max(kept, TILE * dtype.itemsize // 4, scratch)

    loss = results.logps.sum() + (0 if results.entropy is None else results.entropy.sum())
    weights = V * D * (4 + dtype.itemsize) if "weight" in needs else 0  # the float32 sum and the gradient
    _, backward = trace(lambda: loss.backward())
    assert backward.peak <= tiles + weights + SMALL
    assert backward.largest <= max(TILE * dtype.itemsize // 4, V * D * 4, scratch)


@pytest.mark.parametrize("needs", [("hidden",), ("hidden", "weight")], ids=["frozen", "trainable"])
def test_compiled_memory_is_that_of_eager_mode(needs, trace, rows_of_a_tile):
    rows_of_a_tile(ROWS, V, torch.float32)
    inputs = {**head_inputs(N, V, D), "bias": None}
    for name in needs:
        inputs[name].requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(linear_logps, fullgraph=True)
    compiled(**inputs).logps.sum().backward()
    records = []
    for op in (linear_logps, compiled):
        results, forward = trace(lambda op=op: op(**inputs))
        _, backward = trace(lambda results=results: results.logps.sum().backward())
        records.append((forward, backward))
    (forward, backward), (forward_compiled, backward_compiled) = records
    assert abs(forward_compiled.left - forward.left) <= SMALL
    assert forward_compiled.peak <= forward.peak + SMALL
    assert backward_compiled.peak <= backward.peak + SMALL


def test_memory_of_autocast_is_a_copy_of_the_weight(trace, rows_of_a_tile):
    d = 256
    rows_of_a_tile(ROWS, V, torch.bfloat16)
    inputs = {**head_inputs(N, V, d), "bias": None}
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        _, record = trace(lambda: linear_logps(**inputs))
    assert V * d * 2 < record.peak <= V * d * 2 + TILE // 2 + 7 * BLOCK + 8 * N * d * 4
