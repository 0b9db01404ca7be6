"""Malformed inputs of every public function: each raises an error that names function and argument.

Each function has one call that is right. Each of its arguments is then replaced by everything that
an argument of its kind must not be.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastdpo import metrics, ops, ref_logps
from fastdpo.commands import run

NAN, INF = math.nan, math.inf

FLOATS = torch.linspace(-1, 1, 8)
IDS = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
LABELS = torch.tensor([[-100, -100, 5, 6], [-100, -100, 7, -100]])
LAYOUT = ops.pack_pairs(IDS, MASK, LABELS)
ROWS = torch.tensor([[0, 0, 0, 3], [0, 3, 3, 2]], dtype=torch.int32)
DATASET = [dict(prompt_ids=[3, 4], chosen_ids=[5], rejected_ids=[6, 7])]
MODEL = LlamaForCausalLM(
    LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1)
)
META_MODEL = copy.deepcopy(MODEL).to("meta")
TOKENS = ops.TokenLogps(torch.zeros(2, 3), entropy=torch.ones(2, 3))
LOSS = ops.preference_loss(*torch.zeros(4, 2))


class Kind(NamedTuple):
    """The malformed values of one kind of argument, by names, given its right value.

    Attributes:
        values: values that are not of the kind. The error names the argument.
        shapes: values whose shape fits no others. The error names one of the arguments.
    """

    values: Callable[[Any], dict[str, object]]
    shapes: Callable[[Any], dict[str, object]] = lambda good: {}


def no_tensors(good: Tensor) -> dict[str, object]:
    with warnings.catch_warnings():  # nested tensors are a prototype, quantized ones will be removed
        warnings.simplefilter("ignore", UserWarning)
        parts = [good.flatten()[:1], good.flatten()]
        of_other_kinds = dict(
            nested=torch.nested.nested_tensor(parts),
            jagged=torch.nested.nested_tensor(parts, layout=torch.jagged),
            quantized=torch.quantize_per_tensor(good.float(), 0.1, 0, torch.qint8),
        )
    return dict(
        of_other_kinds,
        string="abc",
        number=3,
        list=good.tolist(),
        array=good.numpy(),
        function=len,
        sparse=good.to_sparse(),
        complex=good.to(torch.complex64),
    )


def wrong_shapes(good: Tensor) -> dict[str, object]:
    huge = good.reshape(-1)[:1].expand(2**40)
    return {
        "huge": huge.view(2**40, *[1] * (good.dim() - 1)),
        "empty": good[:0],
        "scalar": good.flatten()[0],
        "one more dimension": good[None],
        "one row more": torch.cat([good, good[:1]]),
        "meta": good.to("meta"),
    }


def no_floats(good: Tensor) -> dict[str, object]:
    return {**no_tensors(good), "int": good.long(), "bool": good.bool(), "float8": good.to(torch.float8_e5m2)}


def no_ints(good: Tensor) -> dict[str, object]:
    return {**no_tensors(good), "float": good.double(), "bool": good.bool(), "int16": good.to(torch.int16)}


def no_ids(good: Tensor) -> dict[str, object]:
    last = (good.numel() - 1,)
    beyond = dict(negative=-7, too_large=10**6, huge=2**62, beyond_int32=2**31)
    filled = {
        name: good.long().flatten().index_fill(0, torch.tensor(last), x).view(good.shape) for name, x in beyond.items()
    }
    return {**no_ints(good), **filled}


def no_labels(good: Tensor) -> dict[str, object]:
    return {name: value for name, value in no_ids(good).items() if name != "too_large"}


def required(kind: Kind) -> Kind:
    return Kind(lambda good: {**kind.values(good), "None": None}, kind.shapes)


BEYOND_FLOAT = {"beyond float": 10**400, "below float": -(10**400), "too long to print": 10**5000}
BEYOND_INT = {"beyond int64": 2**63, "below int64": -(2**63) - 1, "too long to print": 10**5000}


def no_number(*others: object) -> Kind:
    values = ("2", [2.0], np.ones(2), 1j, NAN, True, len, *others)
    return Kind(lambda good: {**{repr(x): x for x in values}, **BEYOND_FLOAT})


def no_integer(*others: object) -> Kind:
    return Kind(lambda good: {**{repr(x): x for x in others}, **BEYOND_INT})


def no_bounds(good: Tensor) -> dict[str, object]:
    wrong = dict(falling=[0, 4, 3, 4], from_1=[1, 2, 3, 4], short=[0, 1, 3], negative=[-1, 2, 4], beyond=[0, 2, 9])
    return {**no_ints(good), **{name: good.new_tensor(x) for name, x in wrong.items()}}


def no_rows(good: Tensor) -> dict[str, object]:
    wrong = dict(
        overlapping=[[0, 0, 0, 3], [0, 2, 2, 3]],
        gap=[[0, 0, 0, 2], [0, 2, 3, 2]],
        short=[[0, 0, 0, 3]],
        long=[[0, 0, 0, 3], [0, 3, 3, 4]],
        negative_length=[[0, 0, 0, -3], [0, 3, 3, 2]],
        negative_prefix=[[0, 0, 0, 3], [0, -1, 3, 2]],
        negative_start=[[0, 0, 0, 3], [-1, 2, 3, 2]],
        prefix_behind=[[0, 0, 0, 3], [3, 1, 3, 2]],
        prefix_beyond=[[0, 0, 0, 3], [0, 9, 3, 2]],
        huge=[[0, 0, 0, 3], [0, 2**31 - 1, 3, 2]],
    )
    values = {name: torch.tensor(x, dtype=torch.int32) for name, x in wrong.items()}
    return {**no_ints(good), "int64": good.long(), "columns": good[:, :3], **values}


FLOAT = Kind(no_floats, wrong_shapes)
MAIN_GRAD = Kind(lambda good: {**no_floats(good), "expanded": good[:1].expand_as(good)}, wrong_shapes)
IDS_KIND = Kind(no_ids, wrong_shapes)
LABELS_KIND = Kind(no_labels, wrong_shapes)
INTS = Kind(no_ints, wrong_shapes)
BOUNDS_KIND = Kind(no_bounds, lambda good: {name: x for name, x in wrong_shapes(good).items() if name != "huge"})
REAL = Kind(no_tensors, wrong_shapes)
ANY_DTYPE = Kind(lambda good: {name: x for name, x in no_tensors(good).items() if name != "complex"}, wrong_shapes)
POSITIVE = no_number(0, -1.0, INF)
FINITE = no_number(INF, -INF)
NAMES = Kind(lambda good: {"string": "entropy", "unknown": ("entropy", "x"), "number": 3, "None": None, "numbers": [1]})
BYTES = no_integer("1GiB", -1, NAN, 1e9, True, [1])
SIZE = no_integer("2", 0, -1, 2.0, NAN, True, [1])
FLAG = Kind(lambda good: {repr(x): x for x in ("no", None, 1, [])})
OBJECT = Kind(lambda good: {repr(x): x for x in ("ipo", 3, {}, [], len)})


def values(*wrong: object) -> Kind:
    return Kind(lambda good: {f"{type(x).__name__} {i}": x for i, x in enumerate(wrong)})


class Function(NamedTuple):
    """A public function.

    Attributes:
        call: the function.
        arguments: right arguments by their names, each with its kind.
        aliases: further names that may begin its errors, such as that of a function that it calls.
    """

    call: Callable[..., Any]
    arguments: dict[str, tuple[Any, Kind]]
    aliases: tuple[str, ...] = ()


TRANSFORM = dict(softcap=(5.0, POSITIVE), logit_scale=(1.0, required(FINITE)), temperature=(1.0, required(POSITIVE)))
HEAD = dict(
    hidden=(FLOATS.view(4, 2), required(FLOAT)),
    weight=(torch.ones(9, 2), required(FLOAT)),
    targets=(torch.tensor([1, 2, -100, 8]), required(IDS_KIND)),
)
BOUNDS = torch.tensor([0, 1, 4])
HEAD_OPTIONS = dict(TRANSFORM, bias=(torch.zeros(9), FLOAT), memory_budget=(100, BYTES))
BATCH = dict(
    input_ids=(IDS, required(INTS)),
    attention_mask=(MASK, required(REAL)),
    labels=(LABELS, required(LABELS_KIND)),
)
LOGPS = {
    name: (FLOATS[:2], required(FLOAT))
    for name in ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps")
}
LENGTHS = Kind(
    lambda good: {**no_tensors(good), "bool": good.bool(), "negative": -good},
    wrong_shapes,
)
PAIR_ROWS = (FLOATS.view(4, 2), required(FLOAT))

NO_IDS = (
    *(None, 3, b"ab", {3: 4}, {3, 4}, len, torch.tensor(3), np.array(3), torch.ones(2), torch.ones(2, 1).long()),
    *([True, False], [3, True], [3, np.True_], np.array([True]), torch.tensor([True]), [3, 4.0], [3, "4"], [2**64]),
)

FUNCTIONS = {
    "token_logps": Function(
        ops.token_logps,
        dict(
            logits=(torch.ones(4, 9), required(FLOAT)),
            targets=HEAD["targets"],
            outputs=(("entropy",), NAMES),
            inplace_backward=(False, FLAG),
            **TRANSFORM,
        ),
    ),
    "linear_logps": Function(
        ops.linear_logps,
        dict(**HEAD, **HEAD_OPTIONS, outputs=(("entropy",), NAMES), main_grad=(torch.zeros(9, 2), MAIN_GRAD)),
    ),
    "sequence_logps": Function(
        ops.sequence_logps,
        dict(
            logits=(torch.ones(4, 9), required(FLOAT)),
            targets=HEAD["targets"],
            cu_seqlens=(BOUNDS, BOUNDS_KIND),
            **TRANSFORM,
        ),
        ("token_logps",),
    ),
    "linear_sequence_logps": Function(
        ops.linear_sequence_logps,
        dict(**HEAD, cu_seqlens=(BOUNDS, required(BOUNDS_KIND)), **HEAD_OPTIONS),
        ("linear_logps",),
    ),
    "linear_preference_loss": Function(
        ops.linear_preference_loss,
        dict(
            **HEAD,
            cu_seqlens=(torch.tensor([0, 1, 2, 3, 4]), required(BOUNDS_KIND)),
            ref_chosen_logps=LOGPS["ref_chosen_logps"],
            ref_rejected_logps=LOGPS["ref_rejected_logps"],
            objective=(ops.PreferenceObjective("ipo"), required(OBJECT)),
            weights=(FLOATS[:2], FLOAT),
            **HEAD_OPTIONS,
        ),
        ("linear_sequence_logps", "linear_logps", "preference_loss"),
    ),
    "packed_attention": Function(
        ops.packed_attention,
        dict(
            query=(torch.ones(5, 2, 4), required(FLOAT)),
            key=(torch.ones(5, 1, 4), required(FLOAT)),
            value=(torch.ones(5, 1, 4), required(FLOAT)),
            rows=(ROWS, required(Kind(no_rows, wrong_shapes))),
            scale=(1.0, FINITE),
            window=(2, SIZE),
            softcap=(3.0, POSITIVE),
            sinks=(torch.zeros(2), FLOAT),
        ),
    ),
    "pack": Function(
        ops.pack,
        dict(
            **BATCH,
            groups=(torch.zeros(2, dtype=torch.long), Kind(no_ints, wrong_shapes)),
            shifted=(False, FLAG),
            store_all=(False, FLAG),
            count_padding=(False, FLAG),
            reach=(9, no_integer("2", 2.0, NAN, True, [1])),
        ),
    ),
    "pack_pairs": Function(ops.pack_pairs, dict(**BATCH, share=(True, FLAG)), ("pack",)),
    "Layout.pack": Function(LAYOUT.pack, dict(padded=(IDS, required(ANY_DTYPE)))),
    "Layout.unpack": Function(LAYOUT.unpack, dict(scored=(FLOATS[:3], required(ANY_DTYPE)))),
    "preference_loss": Function(
        ops.preference_loss,
        dict(
            **LOGPS,
            objective=(ops.PreferenceObjective("ipo"), required(OBJECT)),
            chosen_lengths=(torch.tensor([1, 2]), LENGTHS),
            rejected_lengths=(torch.tensor([1, 2]), LENGTHS),
            sft_logps=(FLOATS[:2], FLOAT),
            weights=(FLOATS[:2], FLOAT),
        ),
    ),
    "PreferenceObjective": Function(
        ops.PreferenceObjective,
        dict(
            loss_type=(("sigmoid", "robust"), Kind(lambda good: {repr(x): x for x in ("x", (), None, 3, [1], b"ipo")})),
            loss_weights=((1, 2), values("ab", (1,), 3, (1, NAN), (1, None), (1, 10**400), (10**5000, 1))),
            beta=(0.1, required(POSITIVE)),
            label_smoothing=(0.1, required(no_number(-0.1, 1.0, 0.5))),
            f_divergence_type=("forward_kl", values("x", None, 3, ["forward_kl"], 10**5000)),
            f_alpha_divergence_coef=(0.5, required(FINITE)),
            discopop_tau=(0.1, required(POSITIVE)),
        ),
        ("preference_loss",),
    ),
    "length_desensitized_logps": Function(
        ops.length_desensitized_logps,
        dict(
            logps=PAIR_ROWS,
            mask=(torch.ones(4, 2), required(REAL)),
            ld_alpha=(0.5, required(no_number(-0.1, 1.1))),
        ),
    ),
    "wpo_weights": Function(
        ops.wpo_weights,
        dict(
            logps=PAIR_ROWS,
            log_sum_sq_probs=PAIR_ROWS,
            mask=(torch.ones(4, 2), required(REAL)),
        ),
    ),
    "Means": Function(
        metrics.Means,
        dict(
            names=(("loss",), values("loss", None, 3, [1], ("a", "a"))),
            device=("cpu", values("no", None, 2.0, [], 10**400)),
        ),
    ),
    "Means.update_weighted": Function(
        lambda x, weight: metrics.Means(("x",)).update_weighted({"x": (x, weight)}),
        dict(x=(FLOATS, required(Kind(no_tensors))), weight=(FLOATS, REAL)),
        ("Means",),
    ),
    "Means.update_weighted: pairs": Function(
        lambda x: metrics.Means(("x",)).update_weighted({"x": x}),
        dict(x=((FLOATS, None), values(FLOATS, FLOATS[:2], None, 3, "ab", (FLOATS,), (FLOATS, None, None)))),
        ("Means",),
    ),
    "PreferenceMeans": Function(
        lambda loss, **logps: metrics.PreferenceMeans().update_pairs(loss, **logps),
        dict(
            loss=(LOSS, values(None, 3, "x", LOSS.loss, tuple(LOSS))),
            chosen_logps=(FLOATS[:2], required(REAL)),
            rejected_logps=(FLOATS[:2], required(REAL)),
        ),
    ),
    "PreferenceMeans.update_tokens": Function(
        lambda tokens, mask: metrics.PreferenceMeans().update_tokens(tokens, mask),
        dict(tokens=(TOKENS, values(None, 3, "x", TOKENS.logps)), mask=(torch.ones(2, 3), required(REAL))),
        ("PreferenceMeans",),
    ),
    "precompute": Function(
        ref_logps.precompute,
        dict(
            model=(MODEL, values(None, 3, "gpt2", type(MODEL), torch.nn.Linear(2, 2), [MODEL], META_MODEL)),
            dataset=(DATASET, values("abc", DATASET[0], None, 3, [1], ["abc"], iter(DATASET), [{}], [*DATASET, None])),
            cache_dir=(None, values("", 3, b"cache", True, [], __file__)),
            max_length=(4, no_integer("4", 0, -1, 2.0, NAN, True)),
            truncation_mode=("keep_end", values("keep", None, 3, [])),
            ld_alpha=(0.5, values("0.5", -0.1, 1.1, NAN, True, [])),
            tokens_per_batch=(64, no_integer("4", 0, -1, 2.0, NAN, True, None)),
        ),
    ),
    "precompute: rows": Function(
        lambda **ids: ref_logps.precompute(MODEL, [ids]),
        {
            name: ([3, 4], values("abc", [1.5], [[1]], [None], [-1], [16], [2**40], *NO_IDS))
            for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        },
        ("precompute",),
    ),
    "with_ref_logps": Function(
        ref_logps.with_ref_logps,
        dict(
            dataset=(DATASET, values("abc", DATASET[0], None, 3, [1], [dict(ref_chosen_logps=0.0)])),
            logps=(
                ref_logps.RefLogps(torch.zeros(1), torch.zeros(1)),
                values(None, 3, "x", torch.zeros(1), ref_logps.RefLogps(torch.zeros(1), torch.zeros(2))),
            ),
        ),
    ),
    "run": Function(run.run, dict(command=(["train.py"], values("train.py", None, 3, [], [1], ["no-such-command"])))),
}
"""Each public function that takes data, with arguments of a call that is right."""


class Case(NamedTuple):
    function: str
    argument: str
    name: str
    value: object
    named: tuple[str, ...]


def cases() -> Iterator[Case]:
    for function, (_, arguments, _) in FUNCTIONS.items():
        for argument, (good, kind) in arguments.items():
            for name, value in kind.values(good).items():
                yield Case(function, argument, name, value, (argument,))
            if isinstance(good, Tensor):
                for name, value in kind.shapes(good).items():
                    yield Case(function, argument, name, value, tuple(arguments))


CASES = {f"{case.function}-{case.argument}-{case.name}": case for case in cases()}


@pytest.mark.parametrize("name", CASES)
def test_malformed(name):
    case = CASES[name]
    function = FUNCTIONS[case.function]
    arguments = {argument: good for argument, (good, _) in function.arguments.items()}
    with pytest.raises((TypeError, ValueError)) as caught:
        function.call(**{**arguments, case.argument: case.value})
    names = "|".join(map(re.escape, (case.function, *function.aliases)))
    assert re.match(rf"({names}): .*\b({'|'.join(case.named)})\b", str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 500


RIGHT = [name for name in FUNCTIONS if name != "run"]


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_call_is_accepted(name):
    function = FUNCTIONS[name]
    function.call(**{argument: good for argument, (good, _) in function.arguments.items()})


def test_every_public_function_is_in_the_table():
    public = {name for name in ops.__all__ if callable(getattr(ops, name)) and not isinstance(getattr(ops, name), type)}
    assert public | set(ref_logps.__all__) - {"RefLogps"} <= set(FUNCTIONS)


@pytest.mark.parametrize("kind", [np.float32, np.float64, int, float])
def test_numbers_of_python_and_numpy_are_accepted(kind):
    logits, targets = torch.randn(3, 5), torch.tensor([0, 1, 4])
    scaled = ops.token_logps(logits, targets, temperature=kind(2), logit_scale=kind(3), softcap=kind(5))
    expected = ops.token_logps(logits, targets, temperature=2.0, logit_scale=3.0, softcap=5.0)
    assert torch.equal(scaled.logps, expected.logps)


def test_sizes_of_zero():
    """A matrix without columns has no head; batches without rows are empty results."""
    with pytest.raises(ValueError, match=r"^linear_logps: hidden must be \[N, D\], D > 0; got \[2, 0\]"):
        ops.linear_logps(torch.ones(2, 0), torch.ones(5, 0), torch.tensor([0, 1]))
    for shape in ((3, 2, 0), (3, 0, 4)):
        with pytest.raises(ValueError, match=r"^packed_attention: query must be \[T, H, D\], H > 0, D > 0; got"):
            ops.packed_attention(*[torch.ones(shape)] * 3, torch.tensor([[0, 0, 0, 3]], dtype=torch.int32))
    empty = torch.zeros(0, dtype=torch.long)
    assert ops.linear_logps(torch.ones(0, 2), torch.ones(5, 2), empty).logps.shape == (0,)
    assert ops.token_logps(torch.ones(0, 5), empty).logps.shape == (0,)


ON_META = [
    "linear_logps",
    "linear_sequence_logps",
    "linear_preference_loss",
    "packed_attention",
    "pack",
    "pack_pairs",
    "Layout.pack",
]


@pytest.mark.parametrize("name", ON_META)
def test_all_tensors_on_the_device_meta(name):
    function = FUNCTIONS[name]
    arguments = {argument: good for argument, (good, _) in function.arguments.items()}
    on_meta = {x: value.to("meta") if isinstance(value, Tensor) else value for x, value in arguments.items()}
    names = "|".join(map(re.escape, (name, *function.aliases)))
    with pytest.raises(ValueError, match=rf"^({names}): \w+ must hold values; got a tensor on the device meta"):
        function.call(**on_meta)


def test_logits_on_the_device_meta_give_results_without_values():
    with torch.device("meta"):
        targets = torch.zeros(3, dtype=torch.long)
        assert ops.token_logps(torch.ones(3, 5), targets).logps.shape == (3,)
        assert ops.preference_loss(*torch.zeros(4, 2)).loss.is_meta
