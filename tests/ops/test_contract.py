"""What every op keeps: one table of calls, and the properties that each of them has.

The files of the ops hold only what is special about one of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fastdpo import ops
from fastdpo.accuracy import error
from fastdpo.ops import definitions
from fastdpo.ops.attention import packed_attention
from fastdpo.ops.head import linear_logps
from fastdpo.ops.head.passes import TileFormat
from tests.support.accuracy import assert_as_accurate_as
from tests.support.ops import attention, heads
from tests.support.ops.heads import LEAVES, MODES, OUTPUTS, Dropped, doubled
from tests.support.ops.operators import Operators
from tests.support.ops.tokens import OPTIONS, logits_and_targets

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
ALL = OPTIONS["all"]

SIZES = {"empty": 0, "one": 1, "few": 5, "some": 9, "many": 37}  # tokens of a head
GROUPS = {  # rows of attention
    "one": [(1, [0])],
    "few": [(2, [1, 2]), (1, [1]), (5, [2])],
    "some": attention.GROUPS["mixed"],
    "many": attention.GROUPS["pairs"],
}


class Call(NamedTuple):
    """A call of an op.

    Attributes:
        op, definition: the op, and its definition with the same arguments.
        inputs: tensors by argument, from the name of a size, a dtype and the size of the vocabulary.
        options: the other arguments.
        needs: the arguments that need a gradient.
        loss: the results that the loss depends on.
        kept_rows: the rows of gradient tiles that fit in `memory_budget`, or None for an op without one.
    """

    op: Callable[..., Any]
    definition: Callable[..., Any]
    inputs: Callable[[str, torch.dtype, int], dict[str, Tensor]]
    options: dict[str, Any]
    needs: tuple[str, ...] = LEAVES
    loss: tuple[str, ...] = ("logps",)
    kept_rows: int | None = None


def logits(size: str, dtype: torch.dtype, words: int) -> dict[str, Tensor]:
    n = SIZES[size]
    x, targets = logits_and_targets(n or 1, words, dtype)
    return dict(logits=x[:n], targets=targets[:n])


def packed_logits(size: str, dtype: torch.dtype, words: int) -> dict[str, Tensor]:
    return logits(size, dtype, words) | dict(cu_seqlens=bounds(SIZES[size]))


def padded_logits(size: str, dtype: torch.dtype, words: int) -> dict[str, Tensor]:
    rows, n = SIZES[size] // 4 + 1, SIZES[size]
    x, targets = logits_and_targets(rows * n or 1, words, dtype)
    return dict(logits=x[: rows * n].view(rows, n, words), targets=targets[: rows * n].view(rows, n))


def bounds(n: int) -> Tensor:
    """Of sequences with 0, 3, 4, 4, ... tokens."""
    return torch.tensor([0, 0, *range(3, n, 4), n])


def head(size: str, dtype: torch.dtype, words: int) -> dict[str, Tensor]:
    n = SIZES[size]
    inputs = heads.head_inputs(n or 1, min(words, 131), 3 if words < 9 else 24, dtype)
    return inputs | {name: inputs[name][:n] for name in ("hidden", "targets")}


def bare_head(size: str, dtype: torch.dtype, words: int) -> dict[str, Tensor]:
    inputs = head(size, dtype, words)
    del inputs["bias"]
    return inputs


def packed_head(size: str, dtype: torch.dtype, words: int) -> dict[str, Tensor]:
    return head(size, dtype, words) | dict(cu_seqlens=bounds(SIZES[size]))


def head_of_pairs(size: str, dtype: torch.dtype, words: int) -> dict[str, Tensor]:
    pairs, n = 2 + SIZES[size] // 9, SIZES[size]
    references = (-9 * torch.rand(2, pairs)).to(torch.promote_types(dtype, torch.float32))
    given = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), references, strict=True))
    return head(size, dtype, words) | given | dict(cu_seqlens=torch.arange(2 * pairs + 1) * n // (2 * pairs))


def sums_of_pairs(size: str, dtype: torch.dtype, words: int) -> dict[str, Tensor]:
    names = "chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps"
    return dict(zip(names, -9 * torch.rand(4, max(SIZES[size], 1)).to(dtype), strict=True))


def queries(shape: str, has_sinks: bool, size: str, dtype: torch.dtype, words: int) -> dict[str, Tensor]:
    rows = attention.rows_of(GROUPS[size]) if size in GROUPS else torch.zeros(0, 4, dtype=torch.int32)
    *tensors, _ = attention.attention_inputs(rows, shape, dtype)
    sinks = {"sinks": torch.randn(attention.HEADS[shape][0]).to(dtype)} if has_sinks else {}
    return dict(zip(QKV, tensors, strict=True)) | {"rows": rows, **sinks}


def composed_loss(
    ref_chosen_logps: Tensor, ref_rejected_logps: Tensor, objective: ops.PreferenceObjective, **inputs: Any
) -> ops.PreferenceLoss:
    logps, lengths = definitions.linear_sequence_logps(**inputs)
    counts = dict(zip(("chosen_lengths", "rejected_lengths"), lengths.chunk(2), strict=True))
    return ops.preference_loss(*logps.chunk(2), ref_chosen_logps, ref_rejected_logps, objective, **counts)


LOSSES = {"": ("logps",), ", entropy": ("entropy",), ", both": ("logps", "entropy")}
EVERY = dict(outputs=OUTPUTS)
QKV = ("query", "key", "value")

CALLS = {
    **{
        f"token_logps {option}{loss}": Call(
            ops.token_logps, definitions.token_logps, logits, EVERY | OPTIONS[option], ("logits",), LOSSES[loss]
        )
        for option in OPTIONS
        for loss in LOSSES
        if option in ("plain", "all") or loss == ", both"
    },
    **{
        f"linear_logps {mode}{loss}": Call(
            ops.linear_logps, definitions.linear_logps, head, EVERY | ALL, needs, LOSSES[loss], kept_rows
        )
        for mode, (needs, kept_rows) in MODES.items()
        for loss in LOSSES
    },
    **{
        f"linear_logps of {option}": Call(
            ops.linear_logps, definitions.linear_logps, bare_head, EVERY | OPTIONS[option], LEAVES[:2], kept_rows=1000
        )
        for option in heads.OPTIONS
    },
    "linear_logps of a bias": Call(ops.linear_logps, definitions.linear_logps, head, EVERY, kept_rows=1000),
    "sequence_logps padded": Call(ops.sequence_logps, definitions.sequence_logps, padded_logits, ALL, ("logits",)),
    "sequence_logps packed": Call(ops.sequence_logps, definitions.sequence_logps, packed_logits, ALL, ("logits",)),
    "linear_sequence_logps": Call(
        ops.linear_sequence_logps, definitions.linear_sequence_logps, packed_head, ALL, kept_rows=1000
    ),
    **{
        f"linear_preference_loss{name}": Call(
            ops.linear_preference_loss,
            composed_loss,
            head_of_pairs,
            ALL | dict(objective=ops.PreferenceObjective(losses)),
            loss=("loss",),
            kept_rows=1000,
        )
        for name, losses in {"": "sigmoid", " of lengths": ("ipo", "sft")}.items()
    },
    "preference_loss": Call(
        ops.preference_loss, ops.preference_loss, sums_of_pairs, {}, ("chosen_logps", "rejected_logps"), ("loss",)
    ),
    **{
        f"packed_attention {features}, {shape}, {len(needs)} gradients": Call(
            ops.packed_attention,
            definitions.packed_attention,
            functools.partial(queries, shape, "sinks" in needs),
            attention.FEATURES[features][0],
            needs,
            ("out",),
        )
        for features, shape, needs in (
            ("plain", "grouped", QKV),
            ("plain", "grouped", ("value",)),
            ("plain", "wide values", QKV),
            ("window", "wide values", QKV),
            ("softcap", "grouped", QKV),
            ("sinks", "wide values", (*QKV, "sinks")),
            ("all", "grouped", (*QKV, "sinks")),
            ("all", "wide values", ("key", "sinks")),
        )
    },
}
"""Each op, in each way in which it computes."""

OF_HEADS = [name for name in CALLS if name.startswith("linear")]
SCORED = [name for name in CALLS if not name.startswith(("packed_attention", "preference_loss"))]
DIFFERENTIATED = [name for name in CALLS if CALLS[name].needs]
COMPILED = [
    "token_logps all, both",
    *(f"linear_logps {mode}, both" for mode in ("frozen", "kept", "recomputed")),
    *(name for name in CALLS if name.startswith(("sequence", "linear_sequence", "linear_pref", "packed_attention"))),
]


class Runner:
    """Makes the calls of the table, with tiles of eight rows."""

    def __init__(self, set_tile_rows: Callable[..., None], words: int) -> None:
        self._set_tile_rows, self._words = set_tile_rows, words

    def inputs(self, name: str, size: str = "many", dtype=torch.float32) -> dict[str, Tensor]:
        self._set_tile_rows(8, 131, dtype)
        return CALLS[name].inputs(size, dtype, 7 if size == "few" else self._words)

    def __call__(
        self, name: str, inputs: dict[str, Tensor], op=None, dtype=torch.float32, upstream=lambda x, result: x
    ):
        """Results and gradients by name. `op` replaces the op, `upstream` changes upstream gradients; None: none."""
        call = CALLS[name]
        options = dict(call.options)
        if call.kept_rows is not None and op is not call.definition:
            tiles = TileFormat.of(torch.empty(131, 24), dtype)
            options["memory_budget"] = call.kept_rows * tiles.columns * tiles.dtype.itemsize
        leaves = {x: value.detach().requires_grad_(x in call.needs) for x, value in inputs.items()}
        results = (op or call.op)(**leaves, **options)
        results = {"out": results} if isinstance(results, Tensor) else results._asdict()
        results = {x: value for x, value in results.items() if value is not None}
        of_loss = [results[x] for x in call.loss]
        if call.needs and upstream is None:
            Dropped.apply(*of_loss).backward()
        elif call.needs:
            torch.autograd.backward(of_loss, [upstream(weights(x, dtype), x) for x in of_loss])
        gradients = {f"gradient of {x}": leaves[x].grad for x in call.needs}
        return {x: value.detach() for x, value in results.items()} | gradients


def outputs_of(call: Call, inputs: dict[str, Tensor], leaves: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    """The results that the loss depends on, with leaves as the arguments that need a gradient."""
    results = call.op(**inputs | dict(zip(call.needs, leaves, strict=True)), **call.options, **options)
    return (results,) if isinstance(results, Tensor) else tuple(getattr(results, x) for x in call.loss)


@pytest.fixture
def run(rows_of_a_tile, device):
    """With a vocabulary of one block where torch computes, and of two and a tail in kernels."""
    return Runner(rows_of_a_tile, 131 if device == "cpu" else 5003)


def weights(result: Tensor, dtype: torch.dtype) -> Tensor:
    """An upstream gradient of a result, with the values of a dtype."""
    x = torch.arange(result.numel(), device=result.device, dtype=torch.float64).mul(1.7).cos()
    return x.view(result.shape).to(dtype).to(result.dtype)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_accurate(run, name: str, draws: list[dict[str, Tensor]], dtype=torch.float32) -> None:
    """Compares errors over all draws together: for one token, eager may be exact by chance."""
    definition = CALLS[name].definition

    def collected(op, change=lambda x: x):
        found = [run(name, change(inputs), op, dtype) for inputs in draws]
        return {x: torch.cat([results[x].reshape(-1) for results in found]) for x in found[0]}

    mine, plain, exact = collected(CALLS[name].op), collected(definition), collected(definition, doubled)
    assert mine.keys() == exact.keys()
    for x, value in mine.items():
        if value.is_floating_point():
            assert_as_accurate_as(value, plain[x], exact[x], dtype if "attention" in name else None)
        else:  # rounding may swap the two largest logits
            assert ((value == plain[x]) | (value == exact[x])).all(), x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_as_accurate_as_plain_pytorch(name, dtype, run):
    assert_accurate(run, name, [run.inputs(name, "many", dtype)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_dtypes_of_results(name, dtype, run):
    """Gradients have the dtypes of their inputs, and sums are at least in float32."""
    inputs = run.inputs(name, "some", dtype)
    for x, value in run(name, inputs, dtype=dtype).items():
        if x.startswith("gradient of "):
            assert value.dtype == inputs[x.removeprefix("gradient of ")].dtype
        elif value.is_floating_point():
            assert value.dtype == (dtype if x == "out" else torch.promote_types(dtype, torch.float32))
        else:
            assert value.dtype == (torch.bool if x == "is_top1" else torch.int64)


@pytest.mark.parametrize("name", CALLS)
def test_a_second_call_has_equal_bits(name, run):
    inputs = run.inputs(name, dtype=torch.bfloat16)
    first, second = (run(name, inputs, dtype=torch.bfloat16) for _ in range(2))
    assert same(first, second)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_of_first_and_second_order(name, run):
    inputs, call = run.inputs(name, "few", torch.float64), CALLS[name]
    budget = {} if call.kept_rows is None else {"memory_budget": call.kept_rows * 24 * 8}
    leaves = [inputs[x].requires_grad_() for x in call.needs]
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *leaves: outputs_of(call, inputs, leaves, **budget), leaves, fast_mode="attention" in name)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_transforms(name, run):
    """Those of torch.func, of a call and of its backward."""
    inputs, call = run.inputs(name, "few", torch.float64), CALLS[name]
    inputs |= {x: inputs[x].float() for x in ("bias",) if x in inputs}  # a head casts it
    leaves = [inputs[x] for x in call.needs]

    def result(*leaves):
        return sum(outputs_of(call, inputs, leaves))

    trained = [x.clone().requires_grad_() for x in leaves]
    upstream = weights(result(*trained), torch.float64)
    expected = torch.autograd.grad(result(*trained), trained, upstream)
    found = torch.func.vjp(result, *leaves)[1](upstream)
    batched = torch.func.vmap(lambda x: torch.autograd.grad(result(*trained), trained, x))(torch.stack([upstream] * 2))
    (_, tangent) = torch.func.jvp(result, tuple(leaves), tuple(leaves))
    slope = sum((x * y).sum().double() for x, y in zip(leaves, expected, strict=True))
    assert torch.allclose((tangent * upstream).sum(), slope)
    for x, y, z in zip(expected, found, batched, strict=True):
        assert torch.allclose(x, y)
        assert torch.allclose(x, z[1])


@pytest.mark.parametrize(
    "name",
    ["token_logps plain", "linear_logps kept", "sequence_logps packed", "packed_attention all, grouped, 4 gradients"],
)
def test_compiled_transforms(name, run):
    torch.compiler.reset()
    inputs, call = run.inputs(name, "few"), CALLS[name]

    def gradients(*leaves):
        def loss(*leaves):
            return sum(x.sum() for x in outputs_of(call, inputs, leaves))

        return torch.func.grad(loss, tuple(range(len(leaves))))(*leaves)

    leaves = [inputs[x] for x in call.needs]
    for x, y in zip(torch.compile(gradients, backend="aot_eager")(*leaves), gradients(*leaves), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # float16: tiles are kept in float32
@pytest.mark.parametrize(
    "name", [*COMPILED, "linear_logps nothing", "linear_logps frozen", "linear_logps weight alone"]
)
def test_opcheck(name, dtype, run, monkeypatch):
    """Of the custom ops that a call and its backward make."""
    for module in (linear_logps, packed_attention):
        monkeypatch.setattr(module, "is_traced", lambda: True)
    inputs = run.inputs(name, "some", dtype)
    with Operators() as operators:
        run(name, inputs, dtype=dtype)
    calls = [(func, args) for func, args, _ in operators.calls if func.namespace == "fastdpo"]
    assert len(calls) >= 1 + bool(CALLS[name].needs)
    for func, args in calls:
        torch.library.opcheck(func, tree_map_only(Tensor, Tensor.detach, args), test_utils=CHECKS)


@torch._dynamo.config.patch(error_on_recompile=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_any_number_of_tokens(name, dtype, run):
    torch.compiler.reset()
    compiled = torch.compile(CALLS[name].op, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in ("some", "many"):
        inputs = run.inputs(name, size, dtype)
        assert same(run(name, inputs, compiled, dtype), run(name, inputs, dtype=dtype))


@pytest.mark.parametrize("name", [name for name in COMPILED if name.startswith("linear_logps")])
def test_compiled_autograd(name, run):
    torch.compiler.reset()
    inputs = run.inputs(name, "some")
    op = torch.compile(CALLS[name].op, backend="aot_eager")
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        found = run(name, inputs, op)
    assert same(found, run(name, inputs))


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors(name, run):
    """They have the shapes and dtypes of results and gradients, as in estimates of memory."""
    inputs = run.inputs(name, "some")
    expected = run(name, inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = run(name, {x: mode.from_tensor(value) for x, value in inputs.items()})
    assert found.keys() == expected.keys()
    for x, value in found.items():
        assert (value.shape, value.dtype) == (expected[x].shape, expected[x].dtype)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_autocast_does_not_change_the_backward(name, run):
    inputs, device = run.inputs(name, "some"), torch.get_default_device().type

    def in_float32(**given):
        with torch.autocast(device, enabled=False):
            return CALLS[name].op(**given)

    with torch.autocast(device, torch.bfloat16):
        found = run(name, inputs, in_float32)
    assert same(found, run(name, inputs))


@pytest.mark.parametrize("name", OF_HEADS)
def test_autocast_changes_only_the_matrix_product(name, run):
    inputs, call = run.inputs(name), CALLS[name]
    rounded = {x: value.bfloat16().float() if x in LEAVES else value for x, value in inputs.items()}
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        mine, eager = (run(name, inputs, op) for op in (call.op, call.definition))
    exact = run(name, doubled(rounded), call.definition)
    for x, value in mine.items():
        assert not value.is_floating_point() or value.dtype == torch.float32
        if value.is_floating_point():
            assert_as_accurate_as(value, eager[x], exact[x])


@pytest.mark.parametrize("name", [name for name in CALLS if name != "preference_loss"])
def test_empty_inputs(name, run):
    """Results and gradients are empty or zero, but for the loss of pairs without tokens."""
    inputs = run.inputs(name, "empty")
    for x, value in run(name, inputs).items():
        if x.startswith("gradient of "):
            assert value.shape == inputs[x.removeprefix("gradient of ")].shape
            assert not value.any()
        elif not name.startswith("linear_preference_loss"):  # sums of sequences are zero
            assert not value.any()
            assert len(value) == 0 or "sequence" in name


@pytest.mark.parametrize("form", ["transposed", "sliced"])
@pytest.mark.parametrize("name", CALLS)
def test_inputs_with_other_strides(name, form, run):
    inputs = run.inputs(name, "some")
    expected = run(name, inputs)

    def strided(x: Tensor) -> Tensor:
        if form == "transposed" and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        return torch.stack([x, x + 1], -1)[..., 0]

    given = {x: value if x in ("rows", "cu_seqlens") else strided(value) for x, value in inputs.items()}
    assert not any(given[x].is_contiguous() for x in CALLS[name].needs)
    found = run(name, given, upstream=lambda x, result: strided(x))
    for x, value in found.items():
        assert torch.equal(value, expected[x]) or error(value, expected[x]) < 1e-6, x


@pytest.mark.parametrize("name", SCORED)
def test_int32_targets(name, run):
    inputs = run.inputs(name, "some")
    given = {x: value.int() if x in ("targets", "cu_seqlens") else value for x, value in inputs.items()}
    assert same(run(name, given), run(name, inputs))


@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
@pytest.mark.parametrize("poison", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("name", SCORED)
def test_ignored_tokens_have_no_effect(name, poison, dtype, run):
    """Whatever they are, their results and gradients are exactly zero."""
    inputs = run.inputs(name, dtype=dtype)
    of_tokens = "hidden" if "hidden" in inputs else "logits"
    ignored = (..., [3, 8, 9, 36])  # within a tile, at the start of one, and the last
    inputs["targets"][ignored] = -100
    clean = run(name, inputs, dtype=dtype)
    poisoned = inputs[of_tokens].clone()
    poisoned[(*ignored, slice(None))] = poison

    def poisoned_too(x: Tensor, result: Tensor) -> Tensor:
        if x.shape == inputs["targets"].shape:
            x[ignored] = poison
        return x

    found = run(name, inputs | {of_tokens: poisoned}, dtype=dtype, upstream=poisoned_too)
    assert same(found, clean)
    if f"gradient of {of_tokens}" in found:
        assert not found[f"gradient of {of_tokens}"][(*ignored, slice(None))].any()


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_missing_upstream_gradients_give_no_gradient(name, run):
    found = run(name, run.inputs(name, "some"), upstream=None)
    assert all(found[x] is None or not found[x].any() for x in found if x.startswith("gradient of "))


@pytest.mark.parametrize("name", CALLS)
def test_an_expanded_upstream_gradient(name, run):
    inputs = run.inputs(name, "some")
    ones, expanded = (
        run(name, inputs, upstream=upstream)
        for upstream in (lambda x, _: torch.ones_like(x), lambda x, _: x.new_ones(()).expand_as(x))
    )
    assert same(ones, expanded)


@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_is_not_read(name, run):
    """Tensors of the device meta have no values."""
    with torch.device("cpu"):
        inputs = run.inputs(name, "some")
    expected = run(name, inputs)
    with torch.device("meta"):
        found = run(name, inputs)
    assert same(found, expected)
