"""token_logps: edge cases, gradients written in place, bounded memory. `test_contract.py` has the rest."""

import pytest
import torch
import torch.nn.functional as F

from fastdpo.ops import definitions, token_logps
from fastdpo.ops.head.results import STATISTICS
from tests.support.accuracy import assert_as_accurate_as
from tests.support.ops.heads import OUTPUTS, Dropped
from tests.support.ops.operators import Operators
from tests.support.ops.special_rows import SPECIAL_ROWS, assert_special_row, special_row
from tests.support.ops.tokens import OPTIONS, assert_accurate, logits_and_targets, results_and_gradient

INF = float("inf")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def words(device):
    """A vocabulary of one block where torch computes, and of two and a tail in kernels that run in seconds."""
    return 67 if device == "cpu" else 5003


def test_any_leading_shape():
    logits, targets = logits_and_targets(24, 11)
    flat = token_logps(logits, targets, outputs=OUTPUTS)
    for shape in ((24,), (4, 6), (2, 3, 4)):
        for value, expected in zip(
            token_logps(logits.view(*shape, 11), targets.view(shape), outputs=OUTPUTS), flat, strict=True
        ):
            assert torch.equal(value, expected.view(shape))
    assert torch.equal(token_logps(logits[0], targets[0]).logps, flat.logps[0])
    shifted = token_logps(logits.view(4, 6, 11)[:, :-1], targets.view(4, 6)[:, :-1]).logps  # not a view of rows
    assert torch.equal(shifted, flat.logps.view(4, 6)[:, :-1])


def test_missing_upstream_gradients_give_no_gradient_in_place():
    logits, targets = logits_and_targets(4, 11)
    leaf = logits.clone().requires_grad_()
    results = token_logps(leaf.view_as(leaf), targets, outputs=OUTPUTS, inplace_backward=True)
    Dropped.apply(results.logps, results.entropy).backward()
    assert leaf.grad is None or not leaf.grad.any()
    _, *sums = torch.ops.fastdpo.token_logps_fwd(logits, targets, None, 1.0, 1.0, "")
    assert not torch.ops.fastdpo.token_logps_bwd(None, None, logits, targets, sums, None, 1.0, 1.0).any()


@pytest.mark.parametrize("target", [11, -1, 2**32 + 5, -(2**32) + 5])
@pytest.mark.parametrize("differentiate", [("logps",), ("entropy",), ("logps", "entropy")], ids=str)
def test_targets_outside_the_vocabulary_without_a_check(differentiate, target, unchecked_targets):
    """Results are NaN, and so are gradients unless the upstream gradient is zero."""
    logits, targets = logits_and_targets(6, 11)
    upstream = torch.randn(2, 6)
    expected, clean = results_and_gradient(token_logps, logits, targets, upstream, differentiate)
    targets[[0, 2]] = target
    upstream[:, 2] = 0
    results, gradient = results_and_gradient(token_logps, logits, targets, upstream, differentiate)
    for name in ("logps", "entropy", "log_sum_sq_probs"):
        assert getattr(results, name)[[0, 2]].isnan().all()
    assert not results.is_top1[[0, 2]].any()
    assert gradient[0].isnan().all()
    assert not gradient[2].any()
    rest = [1, 3, 4, 5]
    assert torch.equal(gradient[rest], clean[rest])
    assert all(torch.equal(value[rest], e[rest]) for value, e in zip(results, expected, strict=True))


def test_names_of_outputs_may_come_from_a_generator():
    arguments = logits_and_targets(4, 11)
    results = token_logps(*arguments, outputs=(name for name in OUTPUTS))
    assert all(torch.equal(a, b) for a, b in zip(results, token_logps(*arguments, outputs=OUTPUTS), strict=True))
    with pytest.raises(ValueError, match=r"^token_logps: outputs must be a sequence of names .* got \('logp',\)"):
        token_logps(*arguments, outputs=(name for name in ["logp"]))


@pytest.mark.parametrize("outputs", [(), *((name,) for name in STATISTICS)], ids=str)
def test_statistics_do_not_change_each_other(outputs, words):
    logits, targets = logits_and_targets(4, words)
    together, alone = (token_logps(logits, targets, outputs=names) for names in (OUTPUTS, outputs))
    assert [name for name in OUTPUTS if getattr(alone, name) is not None] == ["logps", *outputs]
    for name in ("logps", *outputs):
        assert torch.equal(getattr(alone, name), getattr(together, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("differentiate", [("logps",), ("logps", "entropy")], ids=str)
def test_inplace_backward(differentiate, dtype, rows_of_a_tile):
    rows_of_a_tile(8, 131, dtype)
    logits, targets = logits_and_targets(37, 131, dtype)
    upstream = torch.randn(2, 37)
    results, expected = results_and_gradient(token_logps, logits, targets, upstream, differentiate, **OPTIONS["all"])
    leaf = logits.clone().requires_grad_()
    rows = leaf * 1
    again = token_logps(rows, targets, outputs=OUTPUTS, inplace_backward=True, **OPTIONS["all"])
    terms = zip(("logps", "entropy"), upstream, strict=True)
    loss = sum((getattr(again, name) * g).sum() for name, g in terms if name in differentiate)
    loss.backward(retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(again, results, strict=True))
    assert torch.equal(rows, expected)
    assert torch.equal(leaf.grad, expected)
    rule = "inplace_backward must be False for a second backward; got True, and the first one has overwritten"
    with pytest.raises(ValueError, match=f"^token_logps: {rule}"):
        loss.backward()


OVERLAPPING = {
    "expanded": lambda: torch.randn(1, 11).expand(3, 11),
    "unfolded": lambda: torch.randn(13).unfold(0, 11, 1),
    "unfolded columns": lambda: torch.randn(13).unfold(0, 11, 1).t(),
}


@pytest.mark.parametrize("form", OVERLAPPING)
def test_inplace_backward_of_overlapping_logits_raises(form):
    logits = OVERLAPPING[form]().requires_grad_()
    rule = "logits must not have elements that overlap in memory, since inplace_backward overwrites them; got strides"
    with pytest.raises(ValueError, match=f"^token_logps: {rule}"):
        token_logps(logits, torch.zeros(logits.shape[:-1], dtype=torch.long), inplace_backward=True)


APART = {
    "no rows, expanded": lambda: torch.randn(1, 11).expand(0, 11),
    "one row of stride 0": lambda: torch.randn(11).as_strided((1, 11), (0, 1)),
    "one word of stride 0": lambda: torch.randn(3).as_strided((3, 1), (1, 0)),
    "rows apart": lambda: torch.randn(3, 13)[:, 1:12],
    "columns": lambda: torch.randn(11, 3).t(),
    "copied": lambda: torch.randn(3, 11).expand(2, 3, 11).transpose(0, 1),  # not a view of rows
    "copied from what overlaps": lambda: torch.randn(77).as_strided((2, 3, 11), (22, 11, 1)),
}


@pytest.mark.parametrize("form", APART)
def test_inplace_backward_of_strided_logits(form):
    logits = APART[form]()
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
    expected = logits.detach().clone().requires_grad_()
    token_logps(expected, targets).logps.sum().backward()
    leaf = logits.requires_grad_()
    token_logps(leaf.view_as(leaf), targets, inplace_backward=True).logps.sum().backward()
    assert torch.equal(leaf.grad, expected.grad)


@pytest.mark.parametrize("is_view", [False, True])
def test_inplace_backward_compiles_fullgraph(is_view):
    if is_view and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 refuses to compile writes to a view of a leaf")
    torch.compiler.reset()
    compiled = torch.compile(token_logps, fullgraph=True, dynamic=True, backend="aot_eager")
    logits, targets = logits_and_targets(9, 11)
    _, expected = results_and_gradient(token_logps, logits, targets, torch.ones(2, 9))
    leaf = logits.requires_grad_()
    given = leaf.view_as(leaf) if is_view else leaf * 1
    results = compiled(given, targets, outputs=OUTPUTS, inplace_backward=True)
    (results.logps + results.entropy).sum().backward()
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("differentiate", [("logps",), ("entropy",), ("logps", "entropy")], ids=str)
def test_a_vocabulary_masked_with_minus_infinity(differentiate, words):
    """Blocks of a kernel have 4096 words: some begin or end with such words, and one has no others."""
    logits, targets = logits_and_targets(23, words)
    upstream = torch.randn(2, 23)
    masked = F.pad(logits, (9, 8192), value=-INF)
    shifted = torch.where(targets < 0, targets, targets + 9)
    results, gradient = results_and_gradient(token_logps, masked, shifted, upstream, differentiate)
    _, eager = results_and_gradient(definitions.token_logps, logits, targets, upstream, differentiate)
    exact, exact_gradient = results_and_gradient(
        definitions.token_logps, logits.double(), targets, upstream.double(), differentiate
    )
    assert not gradient[:, :9].any()
    assert not gradient[:, words + 9 :].any()
    assert_as_accurate_as(gradient[:, 9 : words + 9], eager, exact_gradient)
    for name in ("logps", "entropy", "log_sum_sq_probs"):
        assert_as_accurate_as(getattr(results, name), getattr(exact, name), getattr(exact, name))
    assert (results.mean_logits[targets != -100] == -INF).all()


def test_an_entropy_with_impossible_words_can_be_differentiated_again():
    logits = torch.tensor([[1.0, 2.0, -INF, -500.0]], requires_grad=True)
    once, again = (
        torch.autograd.grad(7 * token_logps(logits, torch.tensor([1]), outputs=["entropy"]).entropy, logits, **options)[
            0
        ]
        for options in ({}, {"create_graph": True})
    )
    assert torch.allclose(once, again)
    assert once.isfinite().all()
    assert torch.autograd.grad(again.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gap_of_300_nats(dtype, words):
    logits = F.pad(torch.tensor([[0.0, -300.0], [-300.0, 0.0]], dtype=dtype), (0, words), value=-INF)
    results, gradient = results_and_gradient(token_logps, logits, torch.tensor([1, 1]), torch.ones(2, 2))
    assert results.logps[0].item() == -300
    assert abs(results.logps[1].item()) < 1e-100
    assert gradient[0, :2].tolist() == [-1, 1]
    assert not gradient[:, 2:].any()
    assert gradient[1].abs().max().item() < 1e-100


@pytest.mark.parametrize("option", ["plain", "softcap"])
@pytest.mark.parametrize("differentiate", [("entropy",), ("logps", "entropy")], ids=str)
@pytest.mark.parametrize("level", [-1000.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_large_logits_are_accurate(level, differentiate, option, dtype, words):
    draws = [logits_and_targets(23, words, dtype) for _ in range(4)]  # such a logit is rounded by as much as a bound
    options = dict(softcap=4000.0) if option == "softcap" else {}
    draws = [(logits + level, targets) for logits, targets in draws]
    assert_accurate(*draws, differentiate=differentiate, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", SPECIAL_ROWS)
def test_special_rows_equal_eager(special, dtype, words):
    assert_special_row(*special_row(special, dtype, words))


def test_ties_go_to_the_first():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0]] * 3)
    assert token_logps(logits, torch.tensor([1, 2, 0]), outputs=("is_top1",)).is_top1.tolist() == [True, False, False]


def test_non_differentiable_statistics_require_no_grad():
    logits, targets = logits_and_targets(5, 7)
    results = token_logps(logits.requires_grad_(), targets, outputs=OUTPUTS)
    differentiable = [name for name, value in results._asdict().items() if value.requires_grad]
    assert differentiable == ["logps", "entropy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", ["plain", "softcap"])
@pytest.mark.parametrize("outputs", [("logps",), OUTPUTS], ids=["logps", "everything"])
def test_memory_is_tiles_and_the_gradient(outputs, option, dtype, trace, rows_of_a_tile):
    n, v, rows = 64, 4096, 4
    rows_of_a_tile(rows, v, dtype)
    tiles = (3 if option == "softcap" else 2) * rows * v * 4
    small = 64 * n * 4  # results, sums and their temporaries: a few dozen times [N]
    logits, targets = logits_and_targets(n, v, dtype)
    logits.requires_grad_()

    results, forward = trace(lambda: token_logps(logits, targets, outputs=outputs, **OPTIONS[option]))
    assert forward.peak <= tiles + small
    assert forward.left <= small
    _, backward = trace(lambda: results.logps.sum().backward())
    assert backward.peak <= tiles + small + logits.nbytes


@pytest.mark.parametrize("option", ["plain", "softcap"])
def test_a_gradient_of_entropy_takes_one_more_tile(option, trace, rows_of_a_tile):
    n, v, rows = 64, 4096, 4
    rows_of_a_tile(rows, v, torch.float32)
    tiles = (4 if option == "softcap" else 3) * rows * v * 4
    logits, targets = logits_and_targets(n, v)
    results = token_logps(logits.requires_grad_(), targets, outputs=("entropy",), **OPTIONS[option])
    _, backward = trace(lambda: (results.logps + results.entropy).sum().backward())
    assert backward.peak <= tiles + 64 * n * 4 + logits.nbytes


def test_the_definition_computes_what_is_requested():
    """A statistic that is not requested costs nothing: the definition is also run in training and in benchmarks."""
    logits, targets = torch.randn(3, 7), torch.tensor([1, -100, 6])

    def operators(outputs: tuple[str, ...]) -> set[str]:
        with Operators() as operators:
            definitions.token_logps(logits, targets, outputs=outputs)
        return {func.name().partition(".")[0] for func, *_ in operators.calls}

    bare = operators(("logps",))
    assert bare.isdisjoint({"aten::exp", "aten::mean", "aten::argmax", "aten::logsumexp"})
    added = {name: operators(("logps", name)) - bare for name in STATISTICS}
    assert "aten::exp" in added["entropy"]
    assert "aten::mean" in added["mean_logits"]
    assert "aten::argmax" in added["is_top1"]
    assert "aten::logsumexp" in added["log_sum_sq_probs"]
    assert all(added[name].isdisjoint({"aten::exp"}) for name in STATISTICS if name != "entropy")
