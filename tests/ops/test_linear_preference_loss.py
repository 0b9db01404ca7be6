"""linear_preference_loss: accuracy in every mode, chunks of pairs, products, memory, errors."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from fastdpo import ops
from fastdpo.ops import PreferenceObjective, definitions, linear_preference_loss
from fastdpo.ops.losses.objectives import LOSSES, SORTED
from fastdpo.testing import assert_as_accurate_as
from tests.support.ops.heads import doubled

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LEAVES = ("hidden", "weight", "bias")
TRANSFORM = dict(softcap=5.0, logit_scale=1.7, temperature=0.7)
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
OBJECTIVES = {
    **{loss: dict(loss_type=loss) for loss in LOSSES if loss not in SORTED},
    "exo_pair": dict(loss_type="exo_pair", label_smoothing=0.1),
    "weighted sum": dict(loss_type=("sigmoid", "sft"), loss_weights=(1.0, 0.5)),
    "alpha divergence": dict(f_divergence_type="alpha_divergence"),
}
V, D = 131, 24
CHOSEN, REJECTED = [5, 1, 17, 3, 8], [4, 9, 0, 2, 8]


def pair_inputs(dtype=torch.float32, chosen=CHOSEN, rejected=REJECTED):
    """Hidden states, weight, bias and targets of pairs, some of them ignored, and a near definitions."""
    n = sum(chosen + rejected)
    hidden, weight, bias, targets = torch.randn(n, D), torch.randn(V, D) / 4, torch.randn(V), torch.randint(V, (n,))
    targets[2::7] = -100
    floats = {"hidden": hidden.to(dtype), "weight": weight.to(dtype), "bias": bias.to(dtype)}
    cu_seqlens = F.pad(torch.tensor(chosen + rejected).cumsum(0), (1, 0))
    logps = definitions.linear_sequence_logps(hidden, weight, targets, cu_seqlens, bias=bias).logps
    chosen_logps, rejected_logps = (logps + torch.randn_like(logps)).chunk(2)
    refs = {"ref_chosen_logps": chosen_logps, "ref_rejected_logps": rejected_logps}
    return {**floats, "targets": targets, "cu_seqlens": cu_seqlens, **refs}


def loss_and_gradients(op, inputs, needs=LEAVES, upstream=0.7, **options):
    leaves = {name: x.detach().clone().requires_grad_(name in needs) for name, x in inputs.items() if name in LEAVES}
    result = op(**{**inputs, **leaves}, **options)
    if needs:
        (upstream * result.loss).backward()
    return result, [leaves[name].grad for name in needs]


def flat(result):
    return [*result.pairs, result.chosen_logps, result.rejected_logps, result.tokens.logps]


def assert_accurate(inputs, needs=LEAVES, objective=None, memory_budget=1 << 20, **options):
    options = {"objective": objective or PreferenceObjective(), **options}
    mine, gradients = loss_and_gradients(linear_preference_loss, inputs, needs, memory_budget=memory_budget, **options)
    eager, eager_gradients = loss_and_gradients(definitions.linear_preference_loss, inputs, needs, **options)
    exact, exact_gradients = loss_and_gradients(definitions.linear_preference_loss, doubled(inputs), needs, **options)
    for x, of_eager, of_exact in zip(*map(flat, (mine, eager, exact)), strict=True):
        assert_as_accurate_as(x, of_eager, of_exact)
    for x, of_eager, of_exact in zip(gradients, eager_gradients, exact_gradients, strict=True):
        assert x.dtype == of_eager.dtype
        assert_as_accurate_as(x, of_eager, of_exact)
    return mine, gradients


MODES = {  # inputs that need a gradient, and tokens whose gradient tiles fit in the budget
    "nothing": ((), 1000),
    "frozen": (("hidden",), 1000),
    "one chunk": (LEAVES, 1000),
    "chunks": (LEAVES, 20),  # of one or two pairs
    "pairs beyond the budget": (LEAVES, 0),  # tiles of eight rows: longer pairs are recomputed
    "weight alone": (("weight",), 20),
    "bias alone": (("bias",), 20),
}


@pytest.fixture
def mode(rows_of_a_tile):
    def arguments(name, dtype=torch.float32):
        rows_of_a_tile(8, V, dtype)
        needs, tokens = MODES[name]
        itemsize = 4 if dtype == torch.float16 else dtype.itemsize
        return dict(needs=needs, memory_budget=tokens * V * itemsize)

    return arguments


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODES)
def test_each_mode_is_as_accurate_as_eager(name, dtype, mode):
    assert_accurate(pair_inputs(dtype), **mode(name, dtype), **TRANSFORM)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_loss_is_as_accurate_as_eager(objective, mode):
    assert_accurate(pair_inputs(), objective=PreferenceObjective(**OBJECTIVES[objective]), **mode("chunks"))


def test_weights_of_pairs(mode):
    assert_accurate(pair_inputs(), weights=torch.rand(len(CHOSEN)), **mode("chunks"))


@pytest.mark.parametrize("name", ["one chunk", "chunks", "frozen"])
def test_results_are_those_of_the_ops_it_is_composed_of(name, mode):
    inputs = pair_inputs(torch.bfloat16)
    objective, needs = PreferenceObjective(loss_type="ipo"), mode(name, torch.bfloat16)
    mine, _ = loss_and_gradients(linear_preference_loss, inputs, objective=objective, outputs=("entropy",), **needs)
    refs = inputs.pop("ref_chosen_logps"), inputs.pop("ref_rejected_logps")
    logps, lengths = ops.linear_sequence_logps(**inputs)
    chosen_lengths, rejected_lengths = lengths.chunk(2)
    lengths = dict(chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
    expected = ops.preference_loss(*logps.chunk(2), *refs, objective, **lengths)
    assert all(map(torch.equal, mine.pairs, expected))
    assert torch.equal(torch.cat([mine.chosen_logps, mine.rejected_logps]), logps)
    del inputs["cu_seqlens"]
    tokens = ops.linear_logps(**inputs, outputs=("entropy",))
    assert torch.equal(mine.tokens.logps, tokens.logps)
    assert torch.equal(mine.tokens.entropy, tokens.entropy)
    assert [x.requires_grad for x in (*mine.pairs, *mine[1:3], *mine.tokens[:2])] == [True] + [False] * 7


def test_the_loss_of_a_layout():
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 4, 0, 0], [5, 6, 7, 10, 0], [5, 6, 3, 2, 1]])
    labels = ids.masked_fill((ids == 0) | (ids == 5), -100)
    layout = ops.pack_pairs(ids, ids != 0, labels)
    hidden, weight, refs = torch.randn(len(layout.token_index), D), torch.randn(V, D), torch.randn(2, 2)
    scored = hidden[layout.label_index]
    mine = linear_preference_loss(scored, weight, layout.labels, layout.label_bounds, *refs)
    logps = ops.linear_logps(hidden[layout.score_index], weight, layout.targets).logps
    expected = ops.preference_loss(*layout.unpack(logps).double().sum(1).float().chunk(2), *refs)
    torch.testing.assert_close(mine.pairs, expected, rtol=1e-6, atol=1e-6)


PRODUCTS = {"nothing": 1, "frozen": 2, "one chunk": 3, "chunks": 3, "weight alone": 2}


def recorded_flops(inputs, trace, needs, memory_budget):
    """Of the products with the weight, without the small one that gives the gradient of the bias."""
    arguments = dict(needs=[name for name in needs if name != "bias"], memory_budget=memory_budget)
    return trace(lambda: loss_and_gradients(linear_preference_loss, inputs, **arguments))[1].flops


@pytest.mark.parametrize("name", PRODUCTS)
def test_number_of_products(name, mode, trace):
    inputs = pair_inputs()
    flops = recorded_flops(inputs, trace, **mode(name))
    assert flops == PRODUCTS[name] * 2 * len(inputs["targets"]) * V * D


def test_only_pairs_beyond_the_budget_are_recomputed(mode, trace):
    flops = recorded_flops(pair_inputs(), trace, **mode("pairs beyond the budget"))
    sizes = [a + b for a, b in zip(CHOSEN, REJECTED, strict=True)]
    products = sum((3 if size <= 8 else 4) * size for size in sizes)
    assert flops == products * 2 * V * D


def test_by_default_only_a_long_pair_has_chunks_of_more_than_a_tile(mode, trace, monkeypatch):
    module = importlib.import_module("fastdpo.ops.losses.linear_preference_loss")
    monkeypatch.setattr(module, "MEMORY_BUDGET", 0)
    monkeypatch.setattr(module, "default_budget", lambda weight: 20 * V * 4)
    arguments, inputs = mode("chunks") | {"memory_budget": None}, pair_inputs(chosen=[9, 8], rejected=[9, 1])
    assert recorded_flops(inputs, trace, **arguments) == 3 * 2 * len(inputs["targets"]) * V * D
    _, recorded = trace(lambda: loss_and_gradients(linear_preference_loss, inputs, **arguments))
    assert recorded.largest < 27 * V * 4


def test_memory_is_the_gradients_and_the_budget(trace, rows_of_a_tile):
    rows_of_a_tile(32, 4096, torch.float32)
    n, v, d = 64 * 16, 4096, 32
    inputs = {"hidden": torch.randn(n, d), "weight": torch.randn(v, d), "targets": torch.randint(v, (n,))}
    inputs["cu_seqlens"], refs = torch.arange(0, n + 1, 16), torch.zeros(2, 32)
    weight = inputs["weight"].requires_grad_()

    def run(budget):
        hidden = inputs["hidden"].detach().requires_grad_()
        arguments = {**inputs, "hidden": hidden, "memory_budget": budget}
        linear_preference_loss(**arguments, ref_chosen_logps=refs[0], ref_rejected_logps=refs[1]).loss.backward()
        gradients, weight.grad = [hidden.grad, weight.grad], None
        return gradients

    budget = 128 * v * 4
    gradients, recorded = trace(lambda: run(budget))
    held = sum(x.nbytes for x in gradients)
    assert recorded.largest == budget
    block = 10 * v * 4  # of logits that are summed, a third of a tile
    assert recorded.peak <= held + budget + 4 * block + 64 * n + v * d * 4


def test_kept_gradients_are_freed_by_the_backward_unless_the_graph_is_retained():
    inputs = {name: x.requires_grad_() if name in LEAVES else x for name, x in pair_inputs().items()}
    loss = linear_preference_loss(**inputs).loss
    first = torch.autograd.grad(loss, [inputs[name] for name in LEAVES], retain_graph=True)
    second = torch.autograd.grad(2 * loss, [inputs[name] for name in LEAVES])
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)
    with pytest.raises(RuntimeError, match="linear_preference_loss: the gradients were freed"):
        torch.autograd.grad(loss, inputs["hidden"])


def test_there_is_no_second_derivative():
    inputs = pair_inputs()
    hidden = inputs["hidden"].requires_grad_()
    loss = linear_preference_loss(**inputs).loss
    with pytest.raises(RuntimeError, match="linear_preference_loss: has no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("name", ["frozen", "one chunk", "chunks"])
def test_ignored_tokens_have_no_effect(name, mode):
    inputs, arguments = pair_inputs(), mode(name)
    ignored = inputs["targets"] == -100
    mine, gradients = loss_and_gradients(linear_preference_loss, inputs, **arguments)
    assert not gradients[0][ignored].any()
    inputs["hidden"][ignored] = torch.nan
    same, same_gradients = loss_and_gradients(linear_preference_loss, inputs, **arguments)
    assert torch.equal(mine.loss, same.loss)
    assert all(map(torch.equal, gradients, same_gradients))


@pytest.mark.parametrize("lengths", [([0], [0]), ([0, 0], [0, 3])], ids=str)
@pytest.mark.parametrize("name", ["frozen", "chunks"])
def test_empty_completions_are_differentiable(name, lengths, mode):
    assert_accurate(pair_inputs(torch.float32, *lengths), **mode(name))


@pytest.mark.parametrize("name", ["frozen", "one chunk", "chunks"])
def test_gradcheck(name, mode):
    inputs, arguments = pair_inputs(torch.float64), mode(name, torch.float64)
    needs = arguments.pop("needs")
    for leaf in needs:
        inputs[leaf].requires_grad_()

    def loss(*leaves):
        given = {**inputs, **dict(zip(needs, leaves, strict=True))}
        return linear_preference_loss(**given, **arguments, **TRANSFORM).loss

    assert torch.autograd.gradcheck(loss, [inputs[leaf] for leaf in needs], fast_mode=True)


@pytest.mark.parametrize("name", ["nothing", "frozen", "chunks"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fullgraph_compiles_for_any_number_of_tokens(name, backend, mode):
    torch._dynamo.reset()
    arguments = {**mode(name), "objective": PreferenceObjective(loss_type=("sigmoid", "sft"))}
    compiled = torch.compile(linear_preference_loss, fullgraph=True, dynamic=True, backend=backend)
    for lengths in ((CHOSEN, REJECTED), ([3, 6], [7, 2])):
        inputs = pair_inputs(torch.float32, *lengths)
        expected, gradients = loss_and_gradients(linear_preference_loss, inputs, **arguments)
        mine, compiled_gradients = loss_and_gradients(compiled, inputs, **arguments)
        torch.testing.assert_close(mine.pairs, expected.pairs)
        torch.testing.assert_close(compiled_gradients, gradients)


@pytest.mark.parametrize("name", ["frozen", "chunks"])
def test_opcheck(name, mode, monkeypatch):
    """Of the arguments that the public function calls the custom op with."""
    module, calls = importlib.import_module("fastdpo.ops.losses.linear_preference_loss"), []
    op = module._fwd
    monkeypatch.setattr(module, "_fwd", lambda *arguments: calls.append(arguments) or op(*arguments))
    loss_and_gradients(linear_preference_loss, pair_inputs(), **mode(name), outputs=("entropy", "is_top1"))
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in calls[0]]
    torch.library.opcheck(op, arguments, test_utils=CHECKS)


def test_autocast_multiplies_in_its_dtype_and_returns_input_dtypes(mode, trace):
    inputs, arguments = pair_inputs(), mode("chunks")

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return loss_and_gradients(linear_preference_loss, inputs, **arguments)

    (mine, gradients), recorded = trace(run)
    assert "c10::BFloat16" in recorded.product_dtypes
    assert {x.dtype for x in gradients} == {torch.float32}
    exact, exact_gradients = loss_and_gradients(
        definitions.linear_preference_loss, doubled(inputs), LEAVES, objective=PreferenceObjective()
    )
    torch.testing.assert_close(mine.loss, exact.loss.float(), rtol=0.02, atol=0.02)
    for x, of_exact in zip(gradients, exact_gradients, strict=True):
        assert (x - of_exact).norm() <= 0.05 * of_exact.norm()
