"""Malformed arguments of every public function: the error names function, argument, rule and what came.

Each function has one call that is right. What an argument must not be follows from its annotation, from the dtype of
its right value and from its name. `tests/ops/test_misuse.py` has the rules that bind several arguments.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fastdpo import checks, metrics, ops, ref_logps
from fastdpo.commands import run

Numbers = Tensor  # of any dtype that is not complex
NAN, INF = math.nan, math.inf
BEYOND_FLOAT, BEYOND_INT = (10**400, -(10**400), 10**5000), (2**63, -(2**63) - 1, 10**5000)


class Wrong(NamedTuple):
    """A value that an argument must not have.

    Attributes:
        rule: what the argument must, as a pattern.
        is_shape: whether it only fits no other argument, which the error may name if the others follow this one.
    """

    value: Any
    rule: str
    is_shape: bool = False


FLOATS = (torch.int64, torch.bool, torch.complex64, torch.float8_e5m2), "be float16, bfloat16, float32 or float64"
IDS = (torch.float64, torch.bool, torch.complex64, torch.int16), "be int32 or int64"
NUMBERS = (torch.complex64,), "be bool, int or floating point"
COUNTS = (torch.complex64, torch.bool), "be int or floating point"
DTYPES = {  # by argument, dtypes that it must not have, and the rule
    **dict.fromkeys(("mask", "attention_mask"), NUMBERS),
    **dict.fromkeys(("chosen_lengths", "rejected_lengths"), COUNTS),
    **dict.fromkeys(("padded", "scored"), ((), "")),
    "rows": ((*IDS[0], torch.int64), "be int32$"),
}
VALUES = {  # by argument, a rule, and values that break it: those of a tensor, or of its last element
    "targets": ("be -100 or ids below 9", (-7, 9, 10**6, 2**31, 2**62)),
    "labels": ("be -100 or token ids", (-7, 2**31, 2**62)),
    **dict.fromkeys(("chosen_lengths", "rejected_lengths"), ("be 0 or more", (-1,))),
    "cu_seqlens": (r"(increase from 0 to 4|be \[2P)", ([0, 4, 3, 4], [1, 2, 3, 4], [0, 1, 3], [-1, 2, 4], [0, 2, 9])),
    "rows": (
        r"(tile \[0, 5\)|have prefixes)",
        (
            *([[0, 0, 0, 3], [0, 2, 2, 3]], [[0, 0, 0, 2], [0, 2, 3, 2]], [[0, 0, 0, 3]], [[0, 3, 3, 2], [0, 0, 0, 3]]),
            *([[0, 0, 0, 3], [0, 3, 3, 4]], [[0, 0, 0, -3], [0, 3, 3, 2]], [[0, 0, 0, 3], [0, -1, 3, 2]]),
            *([[0, 0, 0, 3], [-1, 2, 3, 2]], [[0, 0, 0, 3], [3, 1, 3, 2]], [[0, 0, 0, 3], [0, 9, 3, 2]]),
            *([[0, 0, 0, 3], [0, 2**31 - 1, 3, 2]], [[0, 0, 0, 5], [0, 2, 5, 0]], [[0, 0, 0, 3], [1, 2, 3, 2]]),
        ),
    ),
}
POSITIVE, SIZE = ("be positive and finite", (0, -1.0, INF)), ("be a positive integer", (0, -1))
RANGES = {  # by argument, the rule of a number and numbers that break it
    **dict.fromkeys(("softcap", "temperature", "beta", "discopop_tau"), POSITIVE),
    **dict.fromkeys(("window", "max_length", "tokens_per_batch"), SIZE),
    "simpo_gamma": ("be finite", (INF, -INF)),
    "label_smoothing": (r"(lie in \[0, 1\)|be below 0.5 for robust)", (-0.1, 0.5, 1.0)),
    "ld_alpha": (r"lie in \[0, 1\]", (-0.1, 1.1)),
    "memory_budget": ("be a number of bytes, an int of 0 or more, or None", ("1GiB", -1, 1e9)),
}
NAMES = ("entropy", ("entropy", "x"), ("logp",), 3, None, [1])
LEADING = ("logits", "hidden", "weight", "query", "input_ids", "logps", "x")  # others must have their sizes


def wrong_tensors(name: str, good: Tensor, kind: str, is_optional: bool) -> Iterator[Wrong]:
    for value in ("abc", 3, good.tolist(), good.numpy(), len, *([] if is_optional else [None])):
        yield Wrong(value, "be a tensor")
    with warnings.catch_warnings():  # nested tensors are a prototype, quantized ones will be removed
        warnings.simplefilter("ignore", UserWarning)
        parts = [good.flatten()[:1], good.flatten()]
        yield Wrong(good.to_sparse(), "be a dense tensor")
        yield Wrong(torch.nested.nested_tensor(parts), "be a dense tensor")
        yield Wrong(torch.nested.nested_tensor(parts, layout=torch.jagged), "be a dense tensor")
        yield Wrong(torch.quantize_per_tensor(good.float(), 0.1, 0, torch.qint8), "be a dense tensor")
    dtypes, rule = NUMBERS if kind == "Numbers" else DTYPES.get(name, FLOATS if good.is_floating_point() else IDS)
    for dtype in dtypes:
        yield Wrong(good.to(dtype), rule)
    rule, values = VALUES.get(name, ("", ()))
    for x in values:
        filled = good.long().flatten().index_fill(0, tensor(good.numel() - 1), x) if isinstance(x, int) else None
        yield Wrong(tensor(x, dtype=good.dtype) if filled is None else filled.view(good.shape), rule)


def wrong_shapes(name: str, good: Tensor) -> Iterator[Wrong]:
    huge = good.reshape(-1)[:1].expand(2**40).view(2**40, *[1] * (good.dim() - 1))
    shapes = [good[:0], good.flatten()[0], good[None], torch.cat([good, good[:1]])]
    shapes += [] if name == "value" else [good[..., :0]]
    shapes += [good.flatten()] if good.dim() > 1 else []
    for value in [*shapes, *([] if name == "cu_seqlens" else [huge])]:
        yield Wrong(value, r"(be \[|have (the )?shape|tile|increase)", True)
    yield Wrong(good.to("meta"), "(be on (the CPU or )?the device of|hold values)", True)


def wrong_values(name: str, good: object, annotation: str) -> Iterator[Wrong]:
    is_optional = annotation.endswith("| None")
    kind = annotation.split(" | ")[0]
    nothing = () if is_optional else (None,)
    rule, beyond = RANGES.get(name, ("be (finite|an int or None)", (INF, -INF) if kind == "float" else ()))
    if isinstance(good, Tensor):
        yield from wrong_tensors(name, good, kind, is_optional)
        yield from wrong_shapes(name, good)
    elif kind == "float":
        for value in ("2", [2.0], np.ones(2), 1j, NAN, True, len, *BEYOND_FLOAT, *beyond, *nothing):
            yield Wrong(value, rule)
    elif kind == "int":
        for value in ("2", 2.5, 2.0, NAN, True, [1], *beyond, *nothing):
            yield Wrong(value, rule)
        for value in BEYOND_INT:
            yield Wrong(value, "fit into 64 bits")
    else:
        rule, values = {
            "bool": ("be True or False", ("no", None, 1, [])),
            "Sequence[str]": ("be a sequence of names from", NAMES),
            "PreferenceObjective": ("be a PreferenceObjective, such as", ("ipo", 3, {}, [], len, None)),
        }[kind]
        for value in values:
            yield Wrong(value, rule)


class Function(NamedTuple):
    """A public function.

    Attributes:
        call: the function.
        right: arguments that are right.
        wrong: by argument, a rule and values that break it, where the annotation does not tell.
        aliases: further names that may begin its errors, such as that of a function that it calls.
    """

    call: Callable[..., Any]
    right: dict[str, Any]
    aliases: tuple[str, ...] = ()
    wrong: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType({})


X, PAIRS = torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 2)
TRANSFORM: dict[str, Any] = dict(softcap=5.0, logit_scale=1.0, temperature=1.0)
TARGETS = tensor([1, 2, -100, 8])
LOGITS = dict(logits=torch.ones(4, 9), targets=TARGETS, **TRANSFORM)
HEAD = dict(hidden=X.view(4, 2), weight=torch.ones(9, 2), targets=TARGETS, bias=torch.zeros(9), **TRANSFORM)
HEAD["memory_budget"] = 100
BATCH = dict(
    input_ids=tensor([[3, 4, 5, 6], [3, 4, 7, 0]]),
    attention_mask=tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
    labels=tensor([[-100, -100, 5, 6], [-100, -100, 7, -100]]),
)
LAYOUT = ops.pack_pairs(**BATCH)
IPO = ops.PreferenceObjective("ipo")
REFERENCE = dict.fromkeys(("ref_chosen_logps", "ref_rejected_logps"), PAIRS)
LOSS = dict(chosen_logps=PAIRS, rejected_logps=PAIRS, **REFERENCE, objective=IPO, weights=PAIRS, sft_logps=PAIRS)
LOSS |= dict.fromkeys(("chosen_lengths", "rejected_lengths"), tensor([1, 2]))
ATTENTION = dict(query=torch.ones(5, 2, 4), key=torch.ones(5, 1, 4), value=torch.ones(5, 1, 4), sinks=torch.zeros(2))
ATTENTION |= dict(rows=tensor([[0, 0, 0, 3], [0, 3, 3, 2]], dtype=torch.int32), scale=1.0, window=2, softcap=3.0)
MODEL = LlamaForCausalLM(
    LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1)
)
META_MODEL = copy.deepcopy(MODEL).to("meta")
DATASET = [dict(prompt_ids=[3, 4], chosen_ids=[5], rejected_ids=[6, 7])]
NO_DATASET = ("abc", DATASET[0], None, 3, [1])
OF_DATASET = "(be a datasets.Dataset or a sequence|hold mappings|have prompt_ids|not have ref_chosen)"
NO_IDS = (
    *("abc", [1.5], [[1]], [None], [-1], [16], [2**40], None, 3, b"ab", {3: 4}, {3, 4}, len, tensor(3), np.array(3)),
    *(torch.ones(2), torch.ones(2, 1).long(), [True, False], [3, True], [3, np.True_], np.array([True])),
    *(tensor([True]), [3, 4.0], [3, "4"], [2**64]),
)
ROW = DATASET[0]
TOKENS, LOSSES = ops.TokenLogps(torch.zeros(2, 3), entropy=torch.ones(2, 3)), ops.preference_loss(*torch.zeros(4, 2))
REF_LOGPS = ref_logps.RefLogps(torch.zeros(1), torch.zeros(1))


def update_weighted(x: Numbers, weight: Numbers | None) -> None:
    metrics.Means(("x",)).update_weighted({"x": (x, weight)})


def update_pairs(loss, chosen_logps: Numbers, rejected_logps: Numbers) -> None:
    metrics.PreferenceMeans().update_pairs(loss, chosen_logps, rejected_logps)


def update_tokens(tokens, mask: Tensor) -> None:
    metrics.PreferenceMeans().update_tokens(tokens, mask)


FUNCTIONS = {
    "token_logps": Function(ops.token_logps, dict(LOGITS, outputs=("entropy",), inplace_backward=False)),
    "linear_logps": Function(ops.linear_logps, dict(HEAD, outputs=("entropy",))),
    "sequence_logps": Function(ops.sequence_logps, dict(LOGITS, cu_seqlens=tensor([0, 1, 4])), ("token_logps",)),
    "linear_sequence_logps": Function(
        ops.linear_sequence_logps, dict(HEAD, cu_seqlens=tensor([0, 1, 4])), ("linear_logps",)
    ),
    "linear_preference_loss": Function(
        ops.linear_preference_loss,
        dict(HEAD, **REFERENCE, cu_seqlens=torch.arange(5), objective=IPO, weights=PAIRS),
        ("linear_sequence_logps", "linear_logps", "preference_loss"),
    ),
    "packed_attention": Function(ops.packed_attention, ATTENTION),
    "pack": Function(
        ops.pack,
        dict(
            BATCH, groups=torch.zeros(2).long(), reach=9, tokens=9, shifted=False, store_all=False, count_padding=False
        ),
    ),
    "pack_pairs": Function(ops.pack_pairs, dict(BATCH, share=True), ("pack",)),
    "Layout.pack": Function(LAYOUT.pack, dict(padded=BATCH["input_ids"])),
    "Layout.unpack": Function(LAYOUT.unpack, dict(scored=X[:3])),
    "preference_loss": Function(ops.preference_loss, LOSS),
    "PreferenceObjective": Function(
        ops.PreferenceObjective,
        dict(
            loss_type=("sigmoid", "robust"),
            loss_weights=(1, 2),
            beta=0.1,
            label_smoothing=0.1,
            f_divergence_type="forward_kl",
            f_alpha_divergence_coef=0.5,
            discopop_tau=0.1,
            simpo_gamma=0.5,
        ),
        ("preference_loss",),
        dict(
            loss_type=("be one or several of sigmoid", ("x", (), None, 3, [1], b"ipo")),
            loss_weights=(
                "(be finite|have one weight for each of 2 losses)",
                ("ab", (1,), 3, (1, NAN), (1, None), (1, 10**400), (10**5000, 1)),
            ),
            f_divergence_type=("be one of reverse_kl", ("x", None, 3, ["forward_kl"], 10**5000)),
        ),
    ),
    "Means": Function(
        metrics.Means,
        dict(names=("loss",), device="cpu"),
        wrong=dict(
            names=("be (a sequence of strings|distinct)", ("loss", None, 3, [1], ("a", "a"))),
            device=("be a device or its name", ("no", None, 2.0, [], 10**400)),
        ),
    ),
    "Means.update_weighted": Function(update_weighted, dict(x=X, weight=X), ("Means",)),
    "Means.update_weighted: pairs": Function(
        lambda x: metrics.Means(("x",)).update_weighted({"x": x}),
        dict(x=(X, None)),
        ("Means",),
        dict(x=("be", (X, X[:2], None, 3, "ab", (X,), (X, None, None)))),
    ),
    "PreferenceMeans": Function(
        update_pairs,
        dict(loss=LOSSES, chosen_logps=PAIRS, rejected_logps=PAIRS),
        wrong=dict(loss=("be a PreferenceLoss or the losses", (None, 3, "x", LOSSES.loss, tuple(LOSSES)))),
    ),
    "PreferenceMeans.update_tokens": Function(
        update_tokens,
        dict(tokens=TOKENS, mask=torch.ones(2, 3)),
        ("PreferenceMeans",),
        dict(tokens=("be TokenLogps", (None, 3, "x", TOKENS.logps))),
    ),
    "precompute": Function(
        ref_logps.precompute,
        dict(
            model=MODEL,
            dataset=DATASET,
            cache_dir=None,
            max_length=4,
            truncation_mode="keep_end",
            ld_alpha=0.5,
            tokens_per_batch=64,
        ),
        wrong=dict(
            model=(
                "(be or hold a transformers|hold the values of its parameters)",
                (None, 3, "gpt2", type(MODEL), torch.nn.Linear(2, 2), [MODEL], META_MODEL),
            ),
            dataset=(OF_DATASET, (*NO_DATASET, ["abc"], iter(DATASET), [{}], [*DATASET, None])),
            cache_dir=("be the path of a directory, or None", ("", 3, b"cache", True, [], __file__)),
            truncation_mode=("be", ("keep", None, 3, [])),
            ld_alpha=(r"lie in \[0, 1\] or be None", ("0.5", -0.1, 1.1, NAN, True, [])),
        ),
    ),
    "precompute: rows": Function(
        lambda **ids: ref_logps.precompute(MODEL, [ids]),
        ROW,
        ("precompute",),
        dict.fromkeys(ROW, ("(hold a list of token ids in every row|lie from 0 to 15)", NO_IDS)),
    ),
    "with_ref_logps": Function(
        ref_logps.with_ref_logps,
        dict(dataset=DATASET, logps=REF_LOGPS),
        wrong=dict(
            dataset=(OF_DATASET, (*NO_DATASET, [dict(ref_chosen_logps=0.0)])),
            logps=(
                "(be RefLogps|have 1 rows)",
                (None, 3, "x", torch.zeros(1), ref_logps.RefLogps(torch.zeros(1), torch.zeros(2))),
            ),
        ),
    ),
    "run": Function(
        run.run,
        dict(command=["train.py"]),
        wrong=dict(
            command=(
                "(be a sequence of strings|not be empty|be a script, -m and a module)",
                ("train.py", None, 3, [], [1], ["no-such-command"]),
            )
        ),
    ),
}
"""Each public function that takes data, with arguments of a call that is right."""


def annotations(function: Callable) -> dict[str, str]:
    """Of arguments by name. Those of a head that a function passes on are those of `linear_logps`."""
    parameters = inspect.signature(function).parameters
    head = annotations(ops.linear_logps) if "head" in parameters else {}
    return head | {name: str(x.annotation) for name, x in parameters.items()}


def cases() -> Iterator[tuple[str, str, Wrong]]:
    for name, function in FUNCTIONS.items():
        annotated = annotations(function.call)
        for argument, good in function.right.items():
            if argument in function.wrong:
                rule, values = function.wrong[argument]
                wrong = (Wrong(value, rule) for value in values)
            else:
                wrong = wrong_values(argument, good, annotated[argument])
            yield from ((name, argument, x) for x in wrong)


CASES = list(cases())


def is_told(value: Any, got: str) -> bool:
    """Whether the end of an error tells a value: its kind, dtype, shape, device or an element of a tensor."""
    if not isinstance(value, Tensor):
        parts = value if isinstance(value, tuple | list | str) else ()
        return any(checks.shown(x) in (got, repr(got)) for x in (value, *parts)) or str(tuple(parts)) == got
    if value.is_nested or value.is_quantized or value.is_sparse or value.is_meta:
        return bool(re.search("nested|quantized|layout|meta", got))
    told = str(value.dtype), str([*value.shape]), str(value.device), "a negative or NaN length"
    elements = {value.numel(), *value.flatten()[:99].tolist()}
    return any(x in got for x in told) or bool(elements & {*map(int, re.findall(r"-?\d+", got))})


@pytest.mark.parametrize("case", CASES, ids=[f"{name}-{argument}-{i}" for i, (name, argument, _) in enumerate(CASES)])
def test_malformed(case):
    name, argument, wrong = case
    function = FUNCTIONS[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        function.call(**{**function.right, argument: wrong.value})
    message = str(caught.value)
    found = re.fullmatch(r"(?P<op>[\w.: ]+): (?P<argument>\w+)(?: of \w+)? must (?P<rule>.+); got (?P<got>.+)", message)
    assert found, message
    assert len(message) < 500
    assert found["op"] in (name, *function.aliases)
    if wrong.is_shape and argument in LEADING and found["argument"] != argument:
        assert is_told(function.right[found["argument"]], found["got"]), message
    else:
        assert found["argument"] == argument, message
        assert re.match(wrong.rule, found["rule"]), message
        assert argument in function.wrong or is_told(wrong.value, found["got"]), message


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "run"])
def test_the_right_call_is_accepted(name):
    FUNCTIONS[name].call(**FUNCTIONS[name].right)


def test_every_public_function_is_in_the_table():
    public = {name for name in ops.__all__ if callable(getattr(ops, name)) and not isinstance(getattr(ops, name), type)}
    assert public | set(ref_logps.__all__) - {"RefLogps"} <= set(FUNCTIONS)


@pytest.mark.parametrize("kind", [np.float32, np.float64, int, float])
def test_numbers_of_python_and_numpy_are_accepted(kind):
    logits, targets = torch.randn(3, 5), torch.tensor([0, 1, 4])
    scaled = ops.token_logps(logits, targets, temperature=kind(2), logit_scale=kind(3), softcap=kind(5))
    expected = ops.token_logps(logits, targets, temperature=2.0, logit_scale=3.0, softcap=5.0)
    assert torch.equal(scaled.logps, expected.logps)


ON_META = ["linear_logps", "linear_sequence_logps", "linear_preference_loss", "packed_attention", "pack", "pack_pairs"]


@pytest.mark.parametrize("name", ON_META)
def test_all_tensors_on_the_device_meta(name):
    function = FUNCTIONS[name]
    on_meta = {x: value.to("meta") if isinstance(value, Tensor) else value for x, value in function.right.items()}
    names = "|".join(map(re.escape, (name, *function.aliases)))
    with pytest.raises(ValueError, match=rf"^({names}): \w+ must hold values; got a tensor on the device meta"):
        function.call(**on_meta)


def test_logits_on_the_device_meta_give_results_without_values():
    with torch.device("meta"):
        targets = torch.zeros(3, dtype=torch.long)
        assert ops.token_logps(torch.ones(3, 5), targets).logps.shape == (3,)
        assert ops.preference_loss(*torch.zeros(4, 2)).loss.is_meta
