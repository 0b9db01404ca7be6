"""pruned_linear_logps: the gradient is exactly that of the words that are kept, and what the others held is known."""

from types import SimpleNamespace

import pytest
import torch
from heads import LEAVES, OUTPUTS, Dropped, doubled, head_inputs, results_and_gradients

from fastdpo.ops import linear_logps, pruned_linear_logps, reference
from fastdpo.ops.logit_rows import cuts
from fastdpo.ops.pruned_logps import _fwd, pruned_tiles
from fastdpo.testing import assert_as_accurate_as, error

N, V, D, ROWS, COLUMNS = 37, 131, 24, 8, 20
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TRANSFORM = dict(softcap=5.0, logit_scale=-1.7, temperature=0.7)
WAYS = {  # what needs a gradient, rows whose gradient tiles fit in the budget
    "frozen": (("hidden",), 1000),
    "kept": (LEAVES, 1000),
    "some kept": (LEAVES, 20),
    "recomputed": (LEAVES, 0),
    "weight alone": (("weight",), 20),
    "bias alone": (("bias",), 20),
}


def pruned(hidden, weight, targets, *, columns, through=pruned_linear_logps, **options):
    """As the other ops over heads are called; everything in one."""
    tokens, dropped = through(hidden, weight, targets, columns, **options)
    return SimpleNamespace(**tokens._asdict(), dropped=dropped)


@pytest.fixture
def way(rows_of_a_tile):
    """Sets tiles of eight rows; gives what needs a gradient, a budget, and how many words pass it on."""

    def arguments(name, dtype):
        rows_of_a_tile(ROWS, V, dtype)
        needs, rows = WAYS[name]
        itemsize = pruned_tiles(torch.empty(V, D), dtype, COLUMNS).dtype.itemsize
        return dict(needs=needs, memory_budget=rows * COLUMNS * itemsize, columns=COLUMNS)

    return arguments


def words_of(inputs, columns=COLUMNS, transform=TRANSFORM):
    """Which logits [N, V] pass gradients on."""
    arguments = (inputs[name] for name in ("hidden", "weight", "bias", "targets"))
    dtype = inputs["hidden"].dtype
    _, words, *_ = _fwd(*arguments, *transform.values(), "", dtype, columns, 0, True)
    through = torch.zeros(len(inputs["targets"]), len(inputs["weight"]), dtype=torch.bool)
    rows_of_tiles = cuts(len(through), pruned_tiles(inputs["weight"], dtype, columns).rows)
    for rows, kept in zip(rows_of_tiles, words, strict=True):
        assert torch.equal(kept, kept.unique())
        through[rows, kept] = True
    return through


def exact_gradients_of_logits(inputs, transform=TRANSFORM):
    """[N, V] float64"""
    exact = doubled(inputs)
    logits = torch.nn.functional.linear(exact["hidden"], exact["weight"], exact["bias"]).requires_grad_()
    reference.token_logps(logits, inputs["targets"], **transform).logps.sum().backward()
    return logits.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_through_the_words_that_are_kept(name, dtype, way):
    inputs, upstream, options = head_inputs(N, V, D, dtype), torch.randn(2, N), {**way(name, dtype), **TRANSFORM}
    _, gradients = results_and_gradients(pruned, inputs, upstream, **options)
    given = dict(needs=options["needs"], through=words_of(inputs), **TRANSFORM)
    _, eager = results_and_gradients(reference.linear_logps, inputs, upstream, **given)
    _, exact = results_and_gradients(reference.linear_logps, doubled(inputs), upstream.double(), **given)
    assert gradients.keys() == exact.keys()
    for leaf, gradient in gradients.items():
        assert gradient.dtype == dtype
        assert_as_accurate_as(gradient, eager[leaf], exact[leaf])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["frozen", "kept", "recomputed"])
def test_what_is_dropped_is_what_the_other_words_held(name, dtype, way):
    inputs = head_inputs(N, V, D, dtype)
    results, _ = results_and_gradients(pruned, inputs, **way(name, dtype), **TRANSFORM)
    left_out = exact_gradients_of_logits(inputs).masked_fill(words_of(inputs), 0).abs().sum(1)
    scored = inputs["targets"] != -100
    assert left_out[scored].min() > 0
    assert not results.dropped[~scored].any()
    if dtype in (torch.float32, torch.float64):
        assert (results.dropped - left_out)[scored].abs().le(1e-5 * left_out[scored]).all()
    assert error(results.dropped, left_out) < 4 * torch.finfo(dtype).eps + 1e-5


def test_without_a_transform_what_is_dropped_is_a_probability(way):
    inputs = head_inputs(N, V, D)
    plain = dict(softcap=None, logit_scale=1.0, temperature=1.0)
    results, _ = results_and_gradients(pruned, inputs, **way("kept", torch.float32))
    p = torch.nn.functional.linear(*(doubled(inputs)[name] for name in ("hidden", "weight", "bias"))).softmax(1)
    left_out = p.masked_fill(words_of(inputs, transform=plain), 0).sum(1)
    left_out[inputs["targets"] == -100] = 0
    assert error(results.dropped, left_out) < 1e-5


def test_the_words_that_are_kept_hold_the_most(rows_of_a_tile):
    rows_of_a_tile(ROWS, V, torch.float32)
    inputs = head_inputs(N, V, D)
    through, of_logits = words_of(inputs), exact_gradients_of_logits(inputs).abs()
    for rows in cuts(N, ROWS):
        targets, kept = inputs["targets"][rows].clamp(min=0), through[rows][0]  # an ignored one counts as word 0
        assert kept[targets].all()
        assert kept.sum() == COLUMNS
        mass = of_logits[rows].sum(0)
        others = torch.ones(V, dtype=torch.bool).index_fill(0, targets, False)
        assert mass[kept & others].min() >= mass[~kept].max() * (1 - 1e-5)


@pytest.mark.parametrize("name", ["frozen", "kept", "recomputed"])
def test_the_whole_vocabulary_drops_nothing(name, way):
    inputs, upstream, options = head_inputs(N, V, D), torch.randn(2, N), way(name, torch.float32)
    results, gradients = results_and_gradients(pruned, inputs, upstream, **{**options, "columns": 1000})
    del options["columns"]
    _, expected = results_and_gradients(linear_logps, inputs, upstream, **options)
    assert not results.dropped.any()
    assert all(error(gradient, expected[leaf]) < 1e-6 for leaf, gradient in gradients.items())


def test_one_word_is_the_target_of_each_token_by_itself():
    inputs = head_inputs(5, 7, 3)
    results, gradients = results_and_gradients(pruned, inputs, needs=("hidden",), columns=1)
    through = torch.nn.functional.one_hot(inputs["targets"].clamp(min=0), 7).bool()
    exact = results_and_gradients(reference.linear_logps, doubled(inputs), needs=("hidden",), through=through)
    assert error(gradients["hidden"], exact[1]["hidden"]) < 1e-6
    assert error(results.dropped, torch.where(inputs["targets"] == -100, 0, 1 - exact[0].logps.exp())) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_results_are_the_same_bits_as_without(name, dtype, way):
    inputs, options = head_inputs(N, V, D, dtype), {**way(name, dtype), **TRANSFORM}
    results, _ = results_and_gradients(pruned, inputs, **options)
    del options["columns"]
    expected, _ = results_and_gradients(linear_logps, inputs, **options)
    assert all(torch.equal(getattr(results, output), getattr(expected, output)) for output in OUTPUTS)


@pytest.mark.parametrize("name", ["frozen", "kept", "recomputed"])
def test_the_same_bits_twice(name, way):
    inputs, upstream = head_inputs(N, V, D, torch.bfloat16), torch.randn(2, N)
    options = way(name, torch.bfloat16)
    first, second = (results_and_gradients(pruned, inputs, upstream, **options) for _ in range(2))
    assert torch.equal(first[0].dropped, second[0].dropped)
    assert all(torch.equal(first[1][leaf], second[1][leaf]) for leaf in options["needs"])


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", WAYS)
def test_ignored_rows_are_exactly_zero_and_choose_nothing(name, poison, way):
    inputs, upstream, options = head_inputs(N, V, D), torch.randn(2, N), {**way(name, torch.float32), **TRANSFORM}
    rows = [3, 8, 9, 36]
    inputs["targets"][rows] = -100
    clean, expected = results_and_gradients(pruned, inputs, upstream, **options)
    inputs["hidden"][rows], upstream[:, rows] = poison, float("nan")
    results, gradients = results_and_gradients(pruned, inputs, upstream, **options)
    assert not results.dropped[rows].any()
    assert torch.equal(results.dropped, clean.dropped)
    for leaf, gradient in gradients.items():
        assert torch.equal(gradient, expected[leaf])


@pytest.mark.parametrize("name", ["frozen", "kept", "recomputed"])
def test_no_rows_are_a_differentiable_zero(name, way):
    inputs = head_inputs(5, V, D)
    inputs.update(hidden=inputs["hidden"][:0], targets=inputs["targets"][:0])
    results, gradients = results_and_gradients(pruned, inputs, **way(name, torch.float32))
    assert results.dropped.shape == (0,)
    assert all(gradient.shape == inputs[leaf].shape and not gradient.any() for leaf, gradient in gradients.items())


def test_without_gradients_nothing_is_dropped():
    inputs = head_inputs(5, V, D)
    results, _ = results_and_gradients(pruned, inputs, needs=(), columns=8)
    assert not results.dropped.any()
    assert results.dropped.shape == (5,)


@pytest.mark.parametrize("needs", [(), LEAVES], ids=["nothing", "everything"])
def test_names_of_outputs_may_come_from_a_generator(needs):
    names = (name for name in OUTPUTS)
    results, _ = results_and_gradients(pruned, head_inputs(5, 67, 24), needs=needs, outputs=names, columns=30)
    assert all(getattr(results, name) is not None for name in OUTPUTS)


@pytest.mark.parametrize("name", ["frozen", "kept", "recomputed"])
def test_targets_outside_the_vocabulary_let_nothing_through(name, way, unchecked_targets):
    """Where the gradient from above is zero."""
    inputs, upstream = head_inputs(N, V, D), torch.randn(2, N)
    outside, rest = [2, 20, 36], [i for i in range(N) if i not in (2, 20, 36)]
    upstream[:, outside] = 0
    inputs["targets"][outside] = -100
    options = {**way(name, torch.float32), "outputs": ("logps",)}
    expected, clean = results_and_gradients(pruned, inputs, upstream, **options)
    inputs["targets"][outside] = torch.tensor([V, -1, 2**32 + 7])
    results, gradients = results_and_gradients(pruned, inputs, upstream, **options)
    assert results.logps[outside].isnan().all()
    assert torch.equal(results.logps[rest], expected.logps[rest])
    assert torch.equal(results.dropped[rest], expected.dropped[rest])
    assert all(error(gradient, clean[leaf]) < 1e-6 for leaf, gradient in gradients.items())
    upstream[:, 20] = 1
    _, gradients = results_and_gradients(pruned, inputs, upstream, **options)
    assert all(gradient.isnan().any() for gradient in gradients.values())


def test_no_gradient_from_above_is_none():
    inputs = head_inputs(N, V, D)
    leaves = {leaf: inputs[leaf].requires_grad_() for leaf in LEAVES}
    results = pruned(**leaves, targets=inputs["targets"], columns=COLUMNS)
    Dropped.apply(results.logps).backward()
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves.values())


@pytest.mark.parametrize("name", ["kept", "some kept"])
def test_kept_tiles_are_not_saved_as_activations(name, way):
    """What hooks do with saved tensors, such as move them to the host, is for those that are small."""
    inputs, options = head_inputs(37, 131, 24), way(name, torch.float32)
    leaves = {leaf: inputs[leaf].requires_grad_() for leaf in options.pop("needs")}
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x.clone(), lambda x: x):
        logps = pruned(**leaves, targets=inputs["targets"], **options).logps
    assert torch.Size([131, 24]) in seen
    assert all(shape[1:] in ((), (24,)) or shape.numel() <= 5 * COLUMNS for shape in seen)
    logps.sum().backward()
    found = {leaf: x.grad for leaf, x in leaves.items()}
    for x in leaves.values():
        x.grad = None
    pruned(**leaves, targets=inputs["targets"], **options).logps.sum().backward()
    assert all(torch.equal(x.grad, found[leaf]) for leaf, x in leaves.items())


def test_kept_tiles_are_freed_by_the_backward(way, trace):
    inputs, options = head_inputs(37, 131, 24), way("kept", torch.float32)
    leaves = {leaf: inputs[leaf].requires_grad_() for leaf in options.pop("needs")}
    tiles = min(37 * COLUMNS * 4, options["memory_budget"])
    logps, forward = trace(lambda: pruned(**leaves, targets=inputs["targets"], **options).logps)
    assert forward.left > tiles
    gradients = sum(x.nbytes for x in leaves.values())
    _, again = trace(lambda: logps.sum().backward(retain_graph=True))
    assert again.left >= gradients - 64
    _, last = trace(lambda: logps.sum().backward())
    assert last.left <= -tiles
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        logps.sum().backward()


def test_a_gradient_of_the_entropy_is_refused():
    inputs = head_inputs(5, V, D)
    with pytest.raises(NotImplementedError, match=r"^pruned_linear_logps: entropy must be detached"):
        results_and_gradients(pruned, inputs, differentiate=("entropy",), columns=8)


def test_memory_is_one_tile_and_the_columns_that_are_kept(trace, rows_of_a_tile):
    n, v, d, rows, columns = 64, 8192, 16, 4, 256
    rows_of_a_tile(rows, v, torch.float32)
    inputs = {**head_inputs(n, v, d), "bias": None}
    for name in ("hidden", "weight"):
        inputs[name].requires_grad_()
    small = (n * (8 * d + 64) + n // rows * 2 * columns) * 4 + 16 * v
    results, forward = trace(lambda: pruned(**inputs, columns=columns))
    assert n * columns * 4 <= forward.left <= n * columns * 4 + small
    assert forward.peak <= n * columns * 4 + rows * v * 4 + 7 * v * 4 + small
    _, backward = trace(lambda: results.logps.sum().backward())
    assert backward.peak <= v * d * 4 + 4 * columns * d * 4 + small


@pytest.mark.parametrize("keep", [0, 8])
@pytest.mark.parametrize("form_jacobian", [False, True])
def test_opcheck(keep, form_jacobian, rows_of_a_tile):
    rows_of_a_tile(4, V, torch.float32)
    inputs = head_inputs(10, V, D)
    arguments = (*(inputs[name] for name in ("hidden", "weight", "bias", "targets")), *TRANSFORM.values())
    more = ("entropy", torch.float32, COLUMNS, keep, form_jacobian)
    torch.library.opcheck(_fwd, (*arguments, *more))
    kept, words, jacobian, _, *sums = _fwd(*arguments, *more)
    needs = [True, not form_jacobian, not form_jacobian]
    given = (torch.randn(10), *arguments[:4], kept, words, jacobian, sums[:4], *arguments[4:], torch.float32, needs)
    torch.library.opcheck(torch.ops.fastdpo.pruned_logps_bwd.default, given)


@pytest.mark.parametrize("name", ["frozen", "kept"])
def test_compiles_whole_and_for_any_number_of_tokens(name, way):
    options = way(name, torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(pruned_linear_logps, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (37, 21):
        inputs, upstream = head_inputs(n, V, D), torch.randn(2, n)
        expected, gradients = results_and_gradients(pruned, inputs, upstream, outputs=("logps",), **options)
        results, found = results_and_gradients(
            pruned, inputs, upstream, outputs=("logps",), through=compiled, **options
        )
        assert torch.equal(results.dropped, expected.dropped)
        assert all(error(found[leaf], gradients[leaf]) < 1e-6 for leaf in options["needs"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(columns=0), "columns must be at least 1; got 0"),
        (dict(columns=8, targets=torch.full((5,), V)), f"targets must be -100 or ids below {V}; got {V}"),
    ],
    ids=["columns", "targets"],
)
def test_misuse_is_named(arguments, message):
    inputs = {**head_inputs(5, V, D), **arguments}
    with pytest.raises(ValueError, match=f"^pruned_linear_logps: {message}"):
        pruned(**inputs | {"hidden": inputs["hidden"].requires_grad_()})
