"""packed_attention: layouts and windows, no leaks between rows, bounded memory. `test_contract.py` has the rest."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from fastdpo.accuracy import error, floor
from fastdpo.ops import definitions, packed_attention
from fastdpo.ops.attention import device_layout, pieces
from tests.support.accuracy import assert_as_accurate_as
from tests.support.ops.attention import (
    FEATURES,
    GROUPS,
    HEADS,
    assert_accurate,
    attention_inputs,
    options_of,
    output_and_gradients,
    rows_of,
)

NAN = float("nan")

FLASH = ["plain", "window", "sinks"]  # what torch's flash attention computes on a CPU


@pytest.fixture(params=["as it is", "blocks", "products", "products in blocks"])
def path(request, monkeypatch):
    """The internal path: as chosen, with blocks of few queries, and with matrix products."""

    if "products" in request.param:
        monkeypatch.setitem(packed_attention.__globals__, "CpuFlashPieces", pieces.MatmulPieces)
    if "blocks" in request.param:
        monkeypatch.setattr(pieces, "BLOCK", 3)
        monkeypatch.setattr(pieces, "CPU_SCORE_BYTES", 1 << 10)  # 64 scores of each of 4 heads
    return request.param


@pytest.fixture
def pairs():
    """The layout of prompts with two completions each. The longest row has 42 tokens."""
    return rows_of(GROUPS["pairs"])


@pytest.fixture
def traced(trace):
    """A function that returns the output of a call, and what its forward and its backward allocate."""

    def run(rows, **options):
        *tensors, upstream = attention_inputs(rows)
        query, key, value = (x.requires_grad_() for x in tensors)
        out, forward = trace(lambda: packed_attention(query, key, value, rows, **options))
        _, backward = trace(lambda: out.backward(upstream))
        return out, forward, backward

    return run


ISLANDS = torch.tensor(
    [
        *([0, 0, 0, 3], [0, 7, 3, 4], [0, 7, 7, 2]),  # text, an image, text
        *([0, 10, 9, 1], [0, 16, 10, 6], [0, 16, 16, 5]),  # an image of one token, and the next one right after it
        [0, 14, 21, 3],  # a row that begins with a part of it
        *([24, 7, 24, 7], [24, 7, 31, 2], [24, 9, 33, 140]),  # an image at the start of a row, and a long answer
    ],
    dtype=torch.int32,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("groups", [*GROUPS, "islands"])
def test_every_feature_is_as_accurate_as_eager(groups, features, heads, dtype, path):
    rows = ISLANDS if groups == "islands" else rows_of(GROUPS[groups])
    assert_accurate(rows, attention_inputs(rows, heads, dtype), **options_of(features, heads, dtype))


WINDOWS = {  # rows, and windows around their boundaries
    "prefixes of 5 and 9, and a row of 42": (
        rows_of([(5, [3, (4, [2, 3])]), (9, [1, 6, 33]), (0, [7])]),
        (2, 4, 5, 6, 8, 9, 10, 11, 41, 42),
    ),
    "islands": (ISLANDS, (1, 2, 6, 7, 150)),
    "several blocks": (rows_of([(300, [280, 10, 200]), (0, [301])]), (50, 129, 300, 450)),
}


@pytest.mark.parametrize("heads", ["grouped", "multi-query", "wide values"])
@pytest.mark.parametrize(("name", "window"), [(name, x) for name, (_, windows) in WINDOWS.items() for x in windows])
def test_windows_around_every_boundary(name, window, heads, path):
    rows, _ = WINDOWS[name]
    assert_accurate(rows, attention_inputs(rows, heads), window=window)


def test_islands_equal_attention_with_their_mask():
    """One row of text, an image and text, next to torch's attention with a mask."""
    rows = torch.tensor([[0, 0, 0, 4], [0, 9, 4, 5], [0, 9, 9, 3]], dtype=torch.int32)
    query, key, value, _ = attention_inputs(rows)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[4:9, 4:9] = True
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(packed_attention(query, key, value, rows), expected)
    causal = torch.tensor([[0, 0, 0, 12]], dtype=torch.int32)
    assert error(packed_attention(query, key, value, causal), expected) > 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_many_blocks_are_summed_in_float32(dtype, monkeypatch):
    monkeypatch.setattr(pieces, "CPU_SCORE_BYTES", 1 << 12)  # one or two queries at a time
    rows = rows_of([(100, [90, 70])])
    assert_accurate(rows, attention_inputs(rows, dtype=dtype), softcap=2.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sinks_may_have_a_wider_dtype(dtype, pairs):
    assert_accurate(pairs, attention_inputs(pairs, dtype=torch.bfloat16), sinks=torch.randn(4, dtype=dtype))


@pytest.mark.parametrize("features", [*FLASH, "softcap"])
def test_a_window_that_hides_nothing_changes_nothing(features, pairs):
    inputs, options = attention_inputs(pairs), {**options_of(features), "window": None}
    expected = output_and_gradients(packed_attention, *inputs, pairs, **options)
    for window in (42, 2**40):
        found = output_and_gradients(packed_attention, *inputs, pairs, **{**options, "window": window})
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    hidden = packed_attention(*inputs[:3], pairs, **{**options, "window": 41})
    assert not torch.equal(hidden, expected[0])


@pytest.mark.parametrize("features", ["plain", "window", "softcap"])
def test_infinite_sinks(features, pairs):
    inputs, options = attention_inputs(pairs), options_of(features)
    without = output_and_gradients(packed_attention, *inputs, pairs, **options)
    sinks = torch.tensor([1e4, -1e4, 1e4, -1e4])
    out, *gradients = output_and_gradients(packed_attention, *inputs, pairs, sinks=sinks, **options)
    assert not out[:, ::2].any()
    assert torch.equal(out[:, 1::2], without[0][:, 1::2])
    assert torch.equal(gradients[0][:, 1::2], without[1][:, 1::2])
    assert not gradients[0][:, ::2].any()
    assert all(x.isfinite().all() for x in gradients)
    assert not gradients[3].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("groups", "window"), [([(1, [0])], None), (GROUPS["pairs"], 1)], ids=["alone", "window 1"])
def test_a_query_that_sees_only_itself_returns_its_value(groups, window, heads, dtype, path):
    rows = rows_of(groups)
    inputs = query, key, value, upstream = attention_inputs(rows, heads, dtype)
    out, *gradients = output_and_gradients(packed_attention, *inputs, rows, window=window)
    group = query.shape[1] // key.shape[1]
    assert torch.equal(out, value.repeat_interleave(group, 1))
    of_value = upstream.double().unflatten(1, (-1, group)).sum(2)
    assert error(gradients[2], of_value) <= floor(dtype)
    for gradient in gradients[:2]:  # zero up to rounding
        assert gradient.abs().max() <= 16 * floor(dtype)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("poison", [NAN, float("inf")])
def test_every_feature_of_pairs_propagates_overflows(features, poison, path, pairs):
    inputs, options = attention_inputs(pairs), options_of(features)
    inputs[0][[6, 20], 1, 3] = poison
    out, *gradients = output_and_gradients(packed_attention, *inputs, pairs, **options)
    expected = definitions.packed_attention(*inputs[:3], pairs, **options)
    assert torch.equal(out.isnan(), expected.isnan())
    if poison != poison or "softcap" not in options:  # a softcap bounds infinities
        assert out[[6, 20], 1].isnan().all()
        assert gradients[0][[6, 20], 1].isnan().all()


def test_nan_if_all_scores_overflow(path):
    rows = rows_of([(5, [3, 4])])
    query, key, value, _ = attention_inputs(rows)
    query[9, 1], key[:, 0] = -1e30, 1e30
    out = packed_attention(query, key, value, rows)
    expected = definitions.packed_attention(query, key, value, rows)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out[9, 1].isnan().all()


def test_zero_outputs_are_not_mistaken_for_overflow(path, pairs):
    zeros = [torch.zeros_like(x) for x in attention_inputs(pairs)]
    assert not any(x.any() for x in output_and_gradients(packed_attention, *zeros, pairs))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("heads", ["grouped", "wide values"])
def test_equals_the_attention_of_each_padded_row(heads, window):
    groups = GROUPS["pairs"]
    rows = rows_of(groups)
    query, key, value, _ = attention_inputs(rows, heads)
    out = packed_attention(query, key, value, rows, window=window)
    for prefix, prefix_length, own, own_length in rows.tolist():
        seen = [*range(prefix, prefix + prefix_length), *range(own, own + own_length)]
        q, k, v = (x[seen].transpose(0, 1)[None] for x in (query, key, value))
        visible = torch.ones(len(seen), len(seen), dtype=torch.bool).tril()
        visible = visible if window is None else visible.triu(1 - window)
        alone = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)
        assert error(out[own : own + own_length], alone[prefix_length:]) < 1e-6


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("heads", ["grouped", "wide values"])
@pytest.mark.parametrize("features", FEATURES)
def test_groups_do_not_see_each_other(features, heads, poison, path):
    rows = rows_of(GROUPS["mixed"])
    inputs, options = attention_inputs(rows, heads), options_of(features, heads)
    clean = output_and_gradients(packed_attention, *inputs, rows, **options)[:4]
    foreign = slice(int(rows[2, 2]), int(rows[3, 2]))  # the second group, between two others
    for x in inputs:
        x[foreign] = poison
    poisoned = output_and_gradients(packed_attention, *inputs, rows, **options)[
        :4
    ]  # all groups share the sinks, so their gradient is left out
    for x, expected in zip(poisoned, clean, strict=True):
        assert poison == poison or x[foreign].isnan().all()
        x[foreign] = expected[foreign]
        assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_can_be_differentiated_again(dtype, pairs):
    """Where one tensor is key and value, too."""
    query, key, _, upstream = attention_inputs(pairs, "grouped", dtype)
    leaves, given = (query.requires_grad_(), key.requires_grad_()), []
    for create_graph in (False, True):
        out = packed_attention(query, key, key, pairs)
        given.append(torch.autograd.grad(out, leaves, upstream, create_graph=create_graph))
    for plain, again in zip(*given, strict=True):
        assert again.requires_grad
        assert error(again, plain) < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("value_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", ["grouped", "wide values"])
@pytest.mark.parametrize("features", FEATURES)
def test_autocast_casts_like_torchs_attention(features, heads, value_dtype, pairs):
    """With rotary embeddings, query and key are float32 and value is bfloat16."""
    query, key, value, upstream = attention_inputs(pairs, heads)
    inputs, options = [query, key, value.to(value_dtype), upstream], options_of(features, heads)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        mine = output_and_gradients(packed_attention, *inputs, pairs, **options)
        eager = output_and_gradients(definitions.packed_attention, *inputs, pairs, **options)
        torchs = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in inputs[:3]), enable_gqa=True)
    options = {name: x.double() if name == "sinks" else x for name, x in options.items()}
    exact = output_and_gradients(definitions.packed_attention, *(x.double() for x in inputs), pairs, **options)
    assert [x.dtype for x in mine[:4]] == [torchs.dtype, torch.float32, torch.float32, value_dtype]
    for x, eager_x, exact_x in zip(mine, eager, exact, strict=True):
        assert_as_accurate_as(x, eager_x, exact_x, torch.bfloat16)


def test_memory_is_the_result_and_log_sum_exps(traced):
    out, forward, backward = traced(rows_of([(200, [150, 150]), (300, [200])]))
    t, h, _ = out.shape
    assert forward.left == out.nbytes + h * t * 4
    assert max(forward.largest, backward.largest) < t * t  # bytes: no mask, no scores


def test_memory_of_a_window_is_linear(traced):
    _, forward, backward = traced(rows_of([(1500, [1000, 1000])]), window=64)
    assert max(forward.peak, backward.peak) < 2500**2 // 2  # bytes: half a mask of the row


def test_memory_of_a_softcap_is_a_few_blocks_of_scores(traced, monkeypatch):
    monkeypatch.setattr(pieces, "CPU_SCORE_BYTES", 256 << 10)
    _, *passes = traced(rows_of([(300, [300, 300])]), softcap=2.0)
    for found in passes:
        assert found.largest <= 256 << 10
        assert found.peak < 6 * (256 << 10)  # of 5 MiB of scores


def test_work_of_a_window_is_linear():
    rows, window = rows_of([(1500, [1000, 1000])]), 64
    blocks = list(pieces.query_blocks(device_layout.rows_of(rows, 3500), window, None))
    assert all(a.stop == b.start for (a, _), (b, _) in pairwise(blocks))
    scores = sum(
        (block.stop - block.start) * (keys.stop - keys.start) for block, ranges in blocks for keys, _ in ranges
    )
    assert scores < 3500 * (window + pieces.BLOCK)
