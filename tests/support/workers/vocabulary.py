"""One rank of heads that are cut over the vocabulary, compared with the whole head."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from fastdpo.ops import VocabularyGroup, definitions, linear_logps, linear_sequence_logps
from fastdpo.ops.head import logit_rows
from fastdpo.testing import assert_as_accurate_as, error
from tests.support.ops.heads import LEAVES, OUTPUTS, doubled, head_inputs, results_and_gradients
from tests.support.ops.special_rows import special_row

V = 131
CUTS = {  # rows of each rank: as even as possible, and as uneven as possible
    2: [(66, 65), (1, 130)],
    3: [(44, 44, 43), (1, 129, 1)],
    4: [(33, 33, 33, 32), (1, 2, 100, 28)],
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TRANSFORMS = {
    "plain": {},
    "all": dict(softcap=5.0, logit_scale=1.7, temperature=0.7),
}
NEEDS = {  # inputs that need a gradient, and the memory budget: that of no tile, of some, and of all
    "nothing": ((), 0),
    "frozen": (("hidden",), 0),
    "kept": (LEAVES, 1 << 20),
    "some kept": (LEAVES, 20 * V * 4),
    "recomputed": (LEAVES, 0),
    "weight alone": (("weight",), 1 << 20),
}


def set_up(rows: int = 8) -> None:
    """Starts the process group, and sets small tiles, whose number differs between ranks."""
    dist.init_process_group("gloo")
    logit_rows.TILE_BYTES = rows * V * 4
    logit_rows.MIN_TILE_ROWS, logit_rows.BLOCK_BYTES = 1, 3 * V * 4
    torch.manual_seed(0)  # the inputs of all ranks are the same


def cuts() -> list[VocabularyGroup]:
    sizes = CUTS[dist.get_world_size()]
    return [VocabularyGroup.of(each[dist.get_rank()]) for each in sizes]


def cut(inputs: dict, group: VocabularyGroup) -> dict:
    """The inputs of this rank."""
    start, stop, _ = group.part
    own = {name: None if inputs[name] is None else inputs[name][start:stop] for name in ("weight", "bias")}
    return {**inputs, **own}


def both(inputs: dict, group: VocabularyGroup, upstream=None, **options):
    """Results and gradients of the whole head, and those of the one that is cut."""
    mine = results_and_gradients(linear_logps, cut(inputs, group), upstream, group=group, **options)
    return results_and_gradients(linear_logps, inputs, upstream, **options), mine


def within(gradient: torch.Tensor, whole: torch.Tensor, group: VocabularyGroup) -> torch.Tensor:
    """The gradient of this rank's rows among those of the whole head. Errors are relative to all rows."""
    if gradient.shape == whole.shape:  # hidden
        return gradient
    start, stop, vocabulary = group.part
    return torch.cat([whole[:start], gradient.to(whole.dtype), whole[stop:vocabulary]])


def assert_equal(mine, whole, eps: float, *context: object) -> None:
    """Asserts that results are those of the whole head up to the rounding of float32 sums."""
    for name, x, y in zip(OUTPUTS, mine, whole, strict=True):
        if name == "is_top1":
            assert torch.equal(x, y), (name, context)
        else:
            assert x.dtype == y.dtype
            assert error(x, y) < eps, (name, error(x, y), context)


def every_mode_equals_the_whole_head() -> None:
    set_up()
    groups, grid = cuts(), itertools.product(DTYPES, TRANSFORMS, NEEDS, [("logps",), ("logps", "entropy")])
    for dtype, transform, mode, differentiate in grid:
        inputs, wide = head_inputs(37, V, 24, dtype), torch.promote_types(dtype, torch.float32)
        upstream = torch.randn(2, 37, dtype=wide)
        inputs["targets"][:8] = torch.tensor([0, 1, 2, 3, V - 1, V - 2, -100, -100])
        needs, budget = NEEDS[mode]
        options = dict(needs=needs, differentiate=differentiate, **TRANSFORMS[transform])
        eps = torch.finfo(dtype).eps
        whole, expected = results_and_gradients(linear_logps, inputs, upstream, memory_budget=budget, **options)
        _, eager = results_and_gradients(definitions.linear_logps, inputs, upstream, **options)
        _, exact = results_and_gradients(definitions.linear_logps, doubled(inputs), upstream.double(), **options)
        for group in groups:
            context, of_cut = (group, dtype, transform, mode, differentiate), dict(group=group, memory_budget=budget)
            mine, gradients = results_and_gradients(linear_logps, cut(inputs, group), upstream, **of_cut, **options)
            assert_equal(mine, whole, 1e-13 if dtype == torch.float64 else 2e-6, context)
            assert not any(x[[6, 7]].any() for x in mine)
            assert "hidden" not in gradients or not gradients["hidden"][[6, 7]].any()
            for name, gradient in gradients.items():
                assert gradient.dtype == dtype
                assert_as_accurate_as(within(gradient, exact[name], group), eager[name], exact[name], dtype)
                if dtype in (torch.float64, torch.float32):
                    assert error(within(gradient, expected[name], group), expected[name]) < 50 * eps, (name, context)


def overflows_spread_as_in_the_whole_head() -> None:
    set_up()
    rows = (
        *("an infinite target", "an infinite other", "an infinite target and other"),
        *("an infinite target among the impossible", "an impossible target"),
        *("nothing possible", "nothing possible but the target"),
    )
    for group, special, mode in itertools.product(cuts(), rows, NEEDS):
        needs, budget = NEEDS[mode]
        logits, ids = special_row(special, columns=V)
        hidden, weight = 1e30 * torch.eye(4, 24), torch.zeros(V, 24)  # columns of the weight determine the logits
        weight[:, :4] = logits.t().clamp(-1e30, 1e30) / torch.where(logits.t().isinf(), 1, 1e30)
        inputs = {"hidden": hidden, "weight": weight, "bias": None, "targets": ids}
        options = dict(needs=needs, memory_budget=budget, outputs=tuple(set(OUTPUTS) - {"is_top1"}))
        (whole, expected), (mine, gradients) = both(inputs, group, **options)
        for x, y in zip(mine, whole, strict=True):
            assert x is y is None or torch.allclose(x, y, rtol=1e-5, atol=1e-4, equal_nan=True), (special, mode, x, y)
        for name, x in gradients.items():
            rows = within(x, expected[name], group)
            assert torch.equal(rows.isnan(), expected[name].isnan()), (special, mode, name, group)


def parts_without_a_possible_entry() -> None:
    """The last part is masked by biases of -inf, as padding of a vocabulary is."""
    set_up()
    group = cuts()[0]
    first = sum(group.sizes[:-1])
    for mode, differentiate in itertools.product(NEEDS, [("logps",), ("logps", "entropy")]):
        needs, budget = NEEDS[mode]
        inputs, upstream = head_inputs(37, V, 24), torch.randn(2, 37)
        inputs["bias"][first:] = -torch.inf
        inputs["targets"] = inputs["targets"].clamp(max=first - 1)
        options = dict(needs=needs, memory_budget=budget, differentiate=differentiate)
        (whole, expected), (mine, gradients) = both(inputs, group, upstream, **options)
        mean = OUTPUTS.index("mean_logits")  # -inf
        assert_equal([*mine[:mean], mine[0], *mine[mean + 1 :]], [*whole[:mean], whole[0], *whole[mean + 1 :]], 2e-6)
        assert (mine.mean_logits[mine.logps != 0] == -torch.inf).all()
        for name, x in gradients.items():
            assert error(within(x, expected[name], group), expected[name]) < 1e-5, (name, mode)


def ties_are_won_by_the_first_of_the_largest() -> None:
    set_up()
    for group in cuts():
        weight = torch.zeros(V, 3)
        for column, tied in enumerate([(0, V - 1), (60, 70, 100), (1, 2)]):
            weight[list(tied), column] = 1
        ids = torch.tensor([0, V - 1, 60, 70, 100, 1, 2])
        hidden = torch.eye(3)[[0, 0, 1, 1, 1, 2, 2]]
        inputs = {"hidden": hidden, "weight": weight, "bias": None, "targets": ids}
        (whole, _), (mine, _) = both(inputs, group, needs=())
        assert mine.is_top1.tolist() == whole.is_top1.tolist() == [True, False, True, False, False, True, False]


def confident_predictions_keep_their_gradient() -> None:
    set_up()
    for group, dtype, mode in itertools.product(cuts(), DTYPES[2:], ("frozen", "kept", "recomputed")):
        needs, budget = NEEDS[mode]
        weight, ids = 8 * torch.nn.functional.normalize(torch.randn(V, 64)), torch.randint(V, (37,))
        hidden = weight[ids] / 4 + 0.02 * torch.randn(37, 64)  # the target's logit is 16 nats above the others' mean
        inputs = dict(hidden=hidden.to(dtype), weight=weight.to(dtype), bias=None, targets=ids)
        _, (_, gradients) = both(inputs, group, needs=needs, memory_budget=budget)
        _, exact = results_and_gradients(definitions.linear_logps, doubled(inputs), needs=needs)
        for name, x in gradients.items():
            assert error(within(x, exact[name], group), exact[name]) < 0.02


@contextmanager
def counted():
    """Counts the calls of collectives, and the bytes that this rank gives them."""
    calls, sent = Counter(), Counter()

    def wrap(name):
        collective = getattr(dist, name)

        def count(*args, **kwargs):
            calls[name] += 1
            sent[name] += args[1 if name.startswith("all_gather") else 0].nbytes
            return collective(*args, **kwargs)

        return mock.patch.object(dist, name, count)

    with wrap("all_gather"), wrap("all_reduce"):
        yield calls, sent


def collectives_are_small_and_few() -> None:
    """One in the forward, of a few numbers a token, and one of [N, D] in the backward, on every rank."""
    set_up()
    n, d = 37, 24
    for group, (needs, budget), statistics in itertools.product(cuts(), NEEDS.values(), [(), OUTPUTS[1:]]):
        inputs = cut(head_inputs(n, V, d, torch.bfloat16), group)
        leaves = {name: inputs[name].requires_grad_(name in needs) for name in LEAVES}
        with counted() as (calls, sent):
            results = linear_logps(
                **leaves, targets=inputs["targets"], outputs=statistics, memory_budget=budget, group=group
            )
        assert calls == {"all_gather": 1}
        assert sent["all_gather"] == (5 + len(statistics)) * n * 4
        if needs:
            with counted() as (calls, sent):
                results.logps.sum().backward()
            assert calls == ({"all_reduce": 1} if "hidden" in needs else {})
            assert sent["all_reduce"] == (n * d * 4 if "hidden" in needs else 0)


def other_uses() -> None:
    set_up()
    for group in cuts():
        inputs, upstream = head_inputs(37, V, 24), torch.randn(2, 37)
        (whole, _), (mine, gradients) = both(inputs, group, upstream)
        gathered = [torch.empty(37) for _ in group.sizes]
        dist.all_gather(gathered, mine.entropy.detach())
        assert all(torch.equal(x, mine.entropy) for x in gathered)

        def call(hidden, weight, bias, ids, group=group):
            return tuple(linear_logps(hidden, weight, ids, bias=bias, outputs=OUTPUTS, group=group))

        def recomputed(*args):
            return checkpoint(call, *args, use_reentrant=False)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for run in (recomputed, compiled):
            own = cut(inputs, group)
            leaves = [own[name].detach().clone().requires_grad_() for name in LEAVES]
            results = run(*leaves, inputs["targets"])
            assert_equal(results, mine, 1e-7)
            (results[0] * upstream[0]).sum().backward()
            assert all(error(x.grad, gradients[name]) < 1e-6 for x, name in zip(leaves, LEAVES, strict=True))

        main_grad = torch.ones(group.sizes[group.rank], 24)
        _, again = results_and_gradients(linear_logps, cut(inputs, group), upstream, group=group, main_grad=main_grad)
        assert again["weight"] is None
        torch.testing.assert_close(main_grad - 1, gradients["weight"], rtol=1e-5, atol=1e-5)

        own, bounds = cut(inputs, group), torch.tensor([0, 10, 10, 37])
        sums = linear_sequence_logps(
            own["hidden"], own["weight"], own["targets"], bounds, bias=own["bias"], group=group
        )
        assert error(sums.logps, torch.stack([x.sum() for x in whole.logps.split([10, 0, 27])])) < 1e-6

        nothing = {**inputs, "hidden": inputs["hidden"][:0], "targets": inputs["targets"][:0]}
        _, (empty, gradients) = both(nothing, group)
        assert all(x.shape == (0,) for x in empty)
        assert not any(x.any() for x in gradients.values())

        with mock.patch("fastdpo.ops.head.results.is_host", return_value=False):
            inputs["targets"][3] = V
            _, (results, gradients) = both(inputs, group)
            assert results.logps[3].isnan()
            assert gradients["weight"].isnan().all()
