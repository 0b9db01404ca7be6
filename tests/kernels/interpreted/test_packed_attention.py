"""The backends of packed attention: fastdpo's kernels and libraries of flash attention.

The libraries need GPUs. Stand-ins with the signatures of their functions compute the same results
in plain PyTorch. The tests in tests/ops also run with the kernels (`--device interpreter`).
"""

import sys
from functools import partialmethod

import pytest
import torch

from fastdpo.accuracy import error
from fastdpo.kernels import attention_blocks
from fastdpo.kernels.gather_keys import gather_keys_bwd, gather_keys_fwd
from fastdpo.ops import definitions, packed_attention
from fastdpo.ops.attention import flash, routes
from fastdpo.ops.attention.device_layout import AttentionOptions, DeviceLayout, Kind, rows_of, sizes_of
from fastdpo.ops.attention.flash import varlen_layout
from fastdpo.ops.attention.triton_backend import LEAST_TURNS, TritonBackend, layout_blocks
from tests.support.accuracy import assert_as_accurate_as
from tests.support.ops.attention import assert_accurate, output_and_gradients
from tests.support.stand_ins import flash_libraries

ROWS = [[0, 0, 0, 9], [0, 5, 9, 4], [0, 5, 13, 1], [14, 0, 14, 3], [17, 0, 17, 20], [17, 18, 37, 10]]
ROWS += [[19, 28, 47, 19], [19, 22, 66, 7], [19, 30, 73, 2], [44, 23, 75, 4]]  # prefixes in 2, 2, 2 and 3 pieces
ROWS = torch.tensor(ROWS, dtype=torch.int32)
TOKENS = int(ROWS[-1, 2:].sum())
CPU = torch.device("cpu")
HEADS = {"grouped": (4, 2, 16, 16), "narrow": (3, 1, 12, 12), "wide values": (4, 2, 8, 20)}


def inputs_of(heads, dtype=torch.float32):
    h, h_kv, d, d_v = HEADS[heads]
    return [torch.randn(TOKENS, *shape).to(dtype) for shape in ((h, d), (h_kv, d), (h_kv, d_v), (h, d_v))]


@pytest.fixture(params=routes.BACKENDS)
def backend(request, monkeypatch, installed):
    installed()
    monkeypatch.setenv(routes.VARIABLE, request.param)
    return request.param


def results(op, tensors, rows=ROWS, **options):
    return output_and_gradients(op, *tensors, rows, **options)


OPTIONS = {
    "plain": {},
    "window": dict(window=6),
    "softcap": dict(softcap=2.0),
    "scale and sinks": dict(scale=0.7, sinks=torch.linspace(-1, 2, 4)),
}


@pytest.mark.parametrize(
    ("heads", "option"), [*(("grouped", option) for option in OPTIONS), ("narrow", "plain"), ("wide values", "plain")]
)
def test_as_accurate_as_eager(heads, option, backend):
    if backend == "torch" and option == "softcap":
        with pytest.raises(NotImplementedError, match="got torch: it has no softcap"):
            results(packed_attention, inputs_of(heads, torch.float16), **OPTIONS[option])
        return
    assert_accurate(ROWS, inputs_of(heads, torch.float16), **OPTIONS[option])


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_any_scale(scale, backend):
    tensors = inputs_of("grouped", torch.float16)
    if backend != "triton":
        with pytest.raises(NotImplementedError, match=f"got {backend}: it needs a positive scale; got {scale}"):
            results(packed_attention, tensors, scale=scale)
        return
    assert_accurate(ROWS, tensors, scale=scale)


def test_deterministic_and_groups_do_not_see_each_other(backend):
    tensors = inputs_of("grouped", torch.float16)
    clean, again = (results(packed_attention, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))
    for x in tensors:  # libraries that multiply whole tiles spread NaN: see flash_libraries
        x[14:17] = 30.0 if backend in flash_libraries.TILES else torch.nan
    for x, expected in zip(results(packed_attention, tensors), clean, strict=True):
        assert torch.equal(x[:14], expected[:14])
        assert torch.equal(x[17:], expected[17:])


def configs_of(*sizes):
    return attention_blocks.KernelConfigs(*[attention_blocks.KernelConfig(*sizes, 4, 2)] * 3)


def use_blocks(monkeypatch, sizes, least_turns=LEAST_TURNS):
    """Blocks of these sizes, and programs for a part of the readers of a block if they have this many turns."""
    monkeypatch.setattr(attention_blocks, "kernel_configs", lambda *_: configs_of(*sizes))
    monkeypatch.setattr(TritonBackend, "call", partialmethod(TritonBackend.call, least_turns=least_turns))
    routes.forget()


@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("window", [None, 2, 7, 17, 27])
def test_blocks_of_every_size(window, sizes, monkeypatch):
    """Rows of one or many blocks; prefixes and windows that end within, at and after a block."""
    use_blocks(monkeypatch, sizes)
    tensors = inputs_of("grouped")
    mine = results(packed_attention, tensors, window=window, softcap=2.0)
    exact = results(definitions.packed_attention, [x.double() for x in tensors], window=window, softcap=2.0)
    assert all(error(x, expected) < 2e-6 for x, expected in zip(mine, exact, strict=True))


# A header of several blocks, the last one partial; two prompts behind all of it and behind a part, with two completions
# each; a row that no other one reads.
HEADER = [[0, 0, 0, 37], [0, 37, 37, 12], [0, 49, 49, 9], [0, 49, 58, 5]]
HEADER += [[0, 30, 63, 20], [33, 50, 83, 2], [33, 50, 85, 6], [91, 0, 91, 7]]
HEADER, ALONE = torch.tensor(HEADER, dtype=torch.int32), slice(91, 98)
HEADER_CASES = {
    "plain": ((2, 2, 16, 16), torch.float32, {}),
    "groups of four": ((4, 1, 24, 8), torch.float16, {}),
    "window": ((4, 1, 16, 16), torch.float32, dict(window=29)),
    "softcap": ((2, 2, 8, 40), torch.float16, dict(softcap=2.0, window=60)),
}


def inputs_of_header(case):
    (h, h_kv, d, d_v), dtype, options = HEADER_CASES[case]
    shapes = (h, d), (h_kv, d), (h_kv, d_v), (h, d_v)
    return [torch.randn(ALONE.stop, *shape).to(dtype) for shape in shapes], dict(options, rows=HEADER)


@pytest.mark.parametrize("case", HEADER_CASES)
def test_several_programs_for_the_readers_of_a_header(case, monkeypatch):
    use_blocks(monkeypatch, (16, 16), least_turns=1)
    tensors, options = inputs_of_header(case)
    exact = results(definitions.packed_attention, [x.double() for x in tensors], **options)
    eager = results(definitions.packed_attention, tensors, **options)
    for x in tensors:
        x[ALONE] = torch.nan
    mine = results(packed_attention, tensors, **options)
    for x, eager_x, exact_x in zip(mine, eager, exact, strict=True):
        assert_as_accurate_as(*(y[: ALONE.start] for y in (x, eager_x, exact_x)), x.dtype)


def test_several_programs_give_the_same_bits(monkeypatch):
    """From run to run; and those of one program to all tokens that have one."""
    tensors, options = inputs_of_header("softcap")
    use_blocks(monkeypatch, (16, 16), least_turns=10_000)
    whole = results(packed_attention, tensors, **options)
    use_blocks(monkeypatch, (16, 16), least_turns=1)
    mine, again = (results(packed_attention, tensors, **options) for _ in range(2))
    parts = layout_blocks(rows_of(HEADER, ALONE.stop), 2, 2, 60, configs_of(16, 16), least_turns=1).parts
    assert parts.tokens.tolist() == [*range(49), *range(63, 83), -1]  # header and prompts
    assert {*parts.first_place.diff()[:-1].tolist()} == {3, 4, 7}
    of_one = torch.ones(ALONE.stop, dtype=torch.bool)
    for name, x, y, expected in zip(("out", "queries", "keys", "values"), mine, again, whole, strict=True):
        assert torch.equal(x, y)
        of_one[parts.tokens[:-1]] = name in ("out", "queries")
        assert torch.equal(x[of_one], expected[of_one])


FILLED = (
    [[0, 0, 0, 17], [0, 17, 17, 6], [0, 23, 23, 3], [0, 23, 26, 4], [30, 0, 30, 7]],
    [[0, 0, 0, 10], [0, 6, 10, 27]],
)


@pytest.mark.parametrize("name", ["triton", "flash-attn-2"])
def test_tensors_with_room_are_filled_with_other_rows(name, installed, monkeypatch):
    """As a CUDA graph replays a call: with the same tensors, in which some entries stand for nothing."""
    installed()
    use_blocks(monkeypatch, (16, 16), least_turns=1)
    query, key, value, grad = (torch.randn(37, h, 16).half() for h in (2, 1, 1, 2))
    call = routes.BACKENDS[name].call(Kind.of(query, value, AttentionOptions(0.2, None, None)))

    def results(layout):
        out, lse = call.forward(query, key, value, None, layout.contents)
        return out, lse, *call.backward(grad, query, key, value, out, lse, layout.contents)

    first, second = (call.describe(rows_of(torch.tensor(rows, dtype=torch.int32), 37)) for rows in FILLED)
    sizes = [max(pair) for pair in zip(sizes_of(first), sizes_of(second), strict=True)]
    layout = DeviceLayout(first, CPU, sizes=[n if n == 38 else n + 3 for n in sizes])  # offsets of each token have none
    for host in (second, first):
        layout.fill(host)
        expected = results(DeviceLayout(host, CPU))
        assert all(torch.equal(a, b) for a, b in zip(results(layout), expected, strict=True))
    with pytest.raises(ValueError, match="rows must fit in a layout of the sizes"):
        DeviceLayout(second, CPU).fill(first)


@pytest.mark.parametrize("value_heads", [2, 3])  # as many as key heads, and more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gather_keys_and_its_gradient(dtype, value_heads):
    layout = varlen_layout(rows_of(ROWS, TOKENS))
    key = torch.randn(2, TOKENS, 24).transpose(0, 1).to(dtype)
    value = torch.randn(TOKENS, value_heads, 1500).to(dtype)  # several blocks
    placed = gather_keys_fwd(key, value, layout.places.index)
    assert all(torch.equal(x, of[layout.places.index]) for x, of in zip(placed, (key, value), strict=True))
    grads = [torch.randn_like(x) for x in placed]
    summed = gather_keys_bwd(*grads, layout.places.readers, layout.places.first_reader)
    for x, grad, of in zip(summed, grads, (key, value), strict=True):
        exact = torch.zeros(of.shape, dtype=torch.float64).index_add_(0, layout.places.index.long(), grad.double())
        assert error(x, exact) < torch.finfo(dtype).eps


def test_an_unknown_backend_raises(monkeypatch):
    monkeypatch.setenv(routes.VARIABLE, "cudnn")
    with pytest.raises(ValueError, match=r"FASTDPO_ATTENTION must be one of flash-attn-3, .*, or unset; got cudnn"):
        packed_attention(*inputs_of("grouped")[:3], ROWS)


@pytest.mark.parametrize("name", flash.LIBRARIES)
def test_an_unsupported_call_raises_with_the_reason(name, monkeypatch):
    monkeypatch.setenv(routes.VARIABLE, name)
    with pytest.raises(NotImplementedError, match=f"got {name}: it needs float16 or bfloat16; got torch.float32"):
        packed_attention(*inputs_of("grouped")[:3], ROWS)
    with pytest.raises(NotImplementedError, match=f"got {name}: it has no kernels for this device"):
        packed_attention(*inputs_of("grouped", torch.float16)[:3], ROWS)


def test_a_library_that_is_not_installed_raises(installed, monkeypatch):
    installed()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setenv(routes.VARIABLE, "flash-attn-3")
    with pytest.raises(NotImplementedError, match=r"got flash-attn-3: ModuleNotFoundError: .*flash_attn_interface"):
        packed_attention(*inputs_of("grouped", torch.float16)[:3], ROWS)


def test_a_version_without_a_needed_parameter_raises(installed, monkeypatch):
    installed()
    module = sys.modules["flash_attn.flash_attn_interface"]
    monkeypatch.setattr(module, "_flash_attn_varlen_forward", lambda q, k, v, causal: None)
    monkeypatch.setenv(routes.VARIABLE, "flash-attn-2")
    with pytest.raises(NotImplementedError, match=r"must accept alibi_slopes, cu_seqlens_k, .*; this version does not"):
        packed_attention(*inputs_of("grouped", torch.float16)[:3], ROWS)
