"""The backends of packed attention: fastdpo's kernels and libraries of flash attention.

The libraries need GPUs. Stand-ins with the signatures of their functions compute the same results
in plain PyTorch. The tests in tests/ops also run with the kernels (`--device interpreter`).
"""

import contextlib
import dataclasses
import sys
import types

import pytest
import torch

from fastdpo.kernels.gather_keys import gather_keys_bwd, gather_keys_fwd
from fastdpo.ops import attention_backends, attention_flash, attention_layouts, packed_attention, reference
from fastdpo.testing import assert_as_accurate_as, error

ROWS = [[0, 0, 0, 9], [0, 5, 9, 4], [0, 5, 13, 1], [14, 0, 14, 3], [17, 0, 17, 20], [17, 18, 37, 10]]
ROWS += [[19, 28, 47, 19], [19, 22, 66, 7], [19, 30, 73, 2], [44, 23, 75, 4]]  # prefixes in 2, 2, 2 and 3 pieces
ROWS = torch.tensor(ROWS, dtype=torch.int32)
TOKENS = int(ROWS[-1, 2:].sum())
CPU = torch.device("cpu")
HEADS = {"grouped": (4, 2, 16, 16), "narrow": (3, 1, 12, 12), "wide values": (4, 2, 8, 20)}


def inputs_of(heads, dtype=torch.float32):
    h, h_kv, d, d_v = HEADS[heads]
    return [torch.randn(TOKENS, *shape).to(dtype) for shape in ((h, d), (h_kv, d), (h_kv, d_v), (h, d_v))]


class StandIn:
    """Variable-length flash attention in plain PyTorch, correct or with one of two errors."""

    def __init__(self, top_left=False, leaking=False):
        self.top_left, self.leaking = top_left, leaking

    def _spans(self, q, k, cu_q, cu_k, max_q, max_k):
        assert q.shape[2] % 8 == 0
        assert len(q) == cu_q[-1]
        assert len(k) == cu_k[-1]
        for (a, b), (c, d) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
            assert b - a <= max_q
            assert d - c <= max_k
            yield slice(a, b), slice(c, d)

    def _scores(self, q, k, scale, window_sizes, softcap):
        """Scores [H, n_q, n_k], -inf where hidden, and the derivative of the softcap."""
        keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        slope = torch.ones_like(scores)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
            slope = 1 - (scores / softcap) ** 2
        offset = 0 if self.top_left else len(k) - len(q)
        distance = torch.arange(len(q))[:, None] + offset - torch.arange(len(k))
        hidden = distance < 0
        if window_sizes[0] not in (None, -1):
            hidden |= distance > window_sizes[0]
        return scores.masked_fill(hidden, -torch.inf), slope

    def forward(self, q, k, v, lengths, scale, window_sizes, softcap):
        assert q.shape[2] == k.shape[2] == v.shape[2]
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
        for queries, keys_seen in self._spans(q, k, *lengths):
            scores, _ = self._scores(q[queries], k[keys_seen], scale, window_sizes, softcap)
            values = v[keys_seen].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
            lse[:, queries] = scores.logsumexp(-1)
            out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        return (out + 0 * v.sum() if self.leaking else out), lse

    def backward(self, grad, q, k, v, out, lse, lengths, scale, window_sizes, softcap):
        group = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for queries, keys_seen in self._spans(q, k, *lengths):
            scores, slope = self._scores(q[queries], k[keys_seen], scale, window_sizes, softcap)
            p = (scores - lse[:, queries, None]).exp()
            keys, values = (x[keys_seen].float().repeat_interleave(group, 1) for x in (k, v))
            g = grad[queries].float()
            delta = (g * out[queries].float()).sum(-1).t()[..., None]
            ds = p * (torch.einsum("qhd,khd->hqk", g, values) - delta) * slope * scale
            dq[queries] = torch.einsum("hqk,khd->qhd", ds, keys).to(dq.dtype)
            head_dk = torch.einsum("hqk,qhd->khd", ds, q[queries].float())
            head_dv = torch.einsum("hqk,qhd->khd", p, g)
            dk[keys_seen] = head_dk.unflatten(1, (-1, group)).sum(2).to(dk.dtype)
            dv[keys_seen] = head_dv.unflatten(1, (-1, group)).sum(2).to(dv.dtype)
        return dq, dk, dv


# Functions with the parameters of flash-attn 2.8.3, flash-attn-3 (its folder `hopper`),
# flash-attn-4 4.0.0b36 and torch 2.11 to 2.13.


def library_modules(stand_in):
    """The functions of each library's module, by the name of the module."""

    def forward_2(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert causal
        assert dropout_p == 0
        assert alibi_slopes is None
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window_sizes = (window_size_left, window_size_right)
        return *stand_in.forward(q, k, v, lengths, softmax_scale, window_sizes, softcap), None, None

    def backward_2(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert causal
        assert dropout_p == 0
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window_sizes = (window_size_left, window_size_right)
        grads = stand_in.backward(dout, q, k, v, out, softmax_lse, lengths, softmax_scale, window_sizes, softcap)
        for place, x in zip((dq, dk, dv), grads, strict=True):
            place.copy_(x)

    def forward_3(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        assert causal
        assert out is k_new is rotary_cos is q_descale is None
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *stand_in.forward(q, k, v, lengths, softmax_scale, window_size, softcap), None, None

    def backward_3(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
        dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert causal
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        grads = stand_in.backward(dout, q, k, v, out, softmax_lse, lengths, softmax_scale, window_size, softcap)
        for place, x in zip((dq, dk, dv), grads, strict=True):
            place.copy_(x)

    def forward_4(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, learnable_sink=None, return_lse=False, out=None, lse=None,
    ):  # fmt: skip
        assert causal
        assert return_lse
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window_sizes = (window_size_left, window_size_right)
        return *stand_in.forward(q, k, v, lengths, softmax_scale, window_sizes, softcap), None, None, None

    def backward_4(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        assert causal
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window_sizes = (window_size_left, window_size_right)
        return stand_in.backward(dout, q, k, v, out, lse, lengths, softmax_scale, window_sizes, softcap)

    return {
        "flash_attn.flash_attn_interface": dict(
            _flash_attn_varlen_forward=types.SimpleNamespace(_init_fn=forward_2),  # as in a custom op
            _flash_attn_varlen_backward=types.SimpleNamespace(_init_fn=backward_2),
        ),
        "flash_attn_interface": dict(_flash_attn_forward=forward_3, _flash_attn_backward=backward_3),
        "flash_attn.cute.interface": dict(_flash_attn_fwd=forward_4, _flash_attn_bwd=backward_4),
    }


def torch_functions_of(stand_in):
    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
    ):  # fmt: skip
        assert causal == (window_size_left == -1)
        window_sizes = (window_size_left, window_size_right)
        return *stand_in.forward(q, k, v, (cu_q, cu_k, max_q, max_k), scale, window_sizes, None), None, None, None

    def backward(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, unused, *,
        scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert causal == (window_size_left == -1)
        assert seed.dtype == torch.uint64
        window_sizes = (window_size_left, window_size_right)
        return stand_in.backward(grad, q, k, v, out, lse, (cu_q, cu_k, max_q, max_k), scale, window_sizes, None)

    return forward, backward


@pytest.fixture
def installed(monkeypatch):
    """A function that replaces the libraries by stand-ins, which support the CPU."""

    def install(stand_in=None):
        stand_in = stand_in or StandIn()
        for name, content in library_modules(stand_in).items():
            monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))
        torch_functions = attention_flash.TorchFlash()
        torch_functions.forward_function, torch_functions.backward_function = torch_functions_of(stand_in)
        given = attention_flash.LIBRARIES.items()
        libraries = {name: dataclasses.replace(library, capabilities=(None,)) for name, library in given}
        libraries["torch"] = dataclasses.replace(libraries["torch"], load_functions=lambda: torch_functions)
        for name, library in libraries.items():
            monkeypatch.setitem(attention_backends.BACKENDS, name, library)
        attention_flash.load.cache_clear()
        attention_backends.passes_probe.cache_clear()

    yield install
    attention_flash.load.cache_clear()
    attention_backends.passes_probe.cache_clear()


@pytest.fixture(params=attention_backends.BACKENDS)
def backend(request, monkeypatch, installed):
    installed()
    monkeypatch.setenv(attention_backends.VARIABLE, request.param)
    return request.param


def results(op, tensors, **options):
    *leaves, grad = (x.detach().clone() for x in tensors)
    sinks = options.pop("sinks", None)
    leaves += [] if sinks is None else [sinks.detach().clone()]
    leaves = [x.requires_grad_() for x in leaves]
    out = op(*leaves[:3], ROWS, sinks=leaves[3] if leaves[3:] else None, **options)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


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
    tensors = inputs_of(heads, torch.float16)
    options = {name: x[: HEADS[heads][0]] if name == "sinks" else x for name, x in OPTIONS[option].items()}
    mine = results(packed_attention, tensors, **options)
    eager = results(reference.packed_attention, tensors, **options)
    wide = {name: x.double() if name == "sinks" else x for name, x in options.items()}
    exact = results(reference.packed_attention, [x.double() for x in tensors], **wide)
    for x, eager_x, exact_x in zip(mine, eager, exact, strict=True):
        assert_as_accurate_as(x, eager_x, exact_x, torch.float16)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_any_scale(scale, backend):
    tensors = inputs_of("grouped", torch.float16)
    if backend != "triton":
        with pytest.raises(NotImplementedError, match=f"got {backend}: it needs a positive scale; got {scale}"):
            results(packed_attention, tensors, scale=scale)
        return
    mine, eager = (results(op, tensors, scale=scale) for op in (packed_attention, reference.packed_attention))
    exact = results(reference.packed_attention, [x.double() for x in tensors], scale=scale)
    for x, eager_x, exact_x in zip(mine, eager, exact, strict=True):
        assert_as_accurate_as(x, eager_x, exact_x, torch.float16)


def test_groups_do_not_see_each_other(backend):
    tensors = inputs_of("grouped", torch.float16)
    clean = results(packed_attention, tensors)
    for x in tensors:
        x[14:17] = torch.nan
    for x, expected in zip(results(packed_attention, tensors), clean, strict=True):
        assert torch.equal(x[:14], expected[:14])
        assert torch.equal(x[17:], expected[17:])


def test_deterministic(backend):
    tensors = inputs_of("grouped", torch.float16)
    first, second = (results(packed_attention, tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("window", [None, 2, 7, 17, 27])
def test_blocks_of_every_size(window, sizes, monkeypatch):
    """Rows of one or many blocks; prefixes and windows that end within, at and after a block."""
    from fastdpo.kernels import packed_attention as kernels

    configs = kernels.KernelConfigs(*[kernels.KernelConfig(*sizes, 4, 2)] * 3)
    monkeypatch.setattr(kernels, "kernel_configs", lambda d, d_v, capability: configs)
    tensors = inputs_of("grouped")
    mine = results(packed_attention, tensors, window=window, softcap=2.0)
    exact = results(reference.packed_attention, [x.double() for x in tensors], window=window, softcap=2.0)
    assert all(error(x, expected) < 2e-6 for x, expected in zip(mine, exact, strict=True))


@pytest.mark.parametrize("value_heads", [2, 3])  # as many as key heads, and more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gather_keys_and_its_gradient(dtype, value_heads):
    layout = attention_layouts.varlen_layout("op", ROWS, TOKENS, CPU)
    key = torch.randn(2, TOKENS, 24).transpose(0, 1).to(dtype)
    value = torch.randn(TOKENS, value_heads, 1500).to(dtype)  # several blocks
    placed = gather_keys_fwd(key, value, layout.places.index)
    assert all(torch.equal(x, of[layout.places.index]) for x, of in zip(placed, (key, value), strict=True))
    grads = [torch.randn_like(x) for x in placed]
    summed = gather_keys_bwd(*grads, layout.places.readers, layout.places.first_reader)
    for x, grad, of in zip(summed, grads, (key, value), strict=True):
        exact = torch.zeros(of.shape, dtype=torch.float64).index_add_(0, layout.places.index.long(), grad.double())
        assert error(x, exact) < torch.finfo(dtype).eps


def test_layouts_do_not_depend_on_the_default_device():
    with torch.device("meta"):  # stands for a GPU set by torch.set_default_device
        varlen = attention_layouts.varlen_layout("op", ROWS, TOKENS, CPU)
        blocks = attention_layouts.layout_blocks("op", ROWS, TOKENS, 16, 16, CPU)
    for layout in (varlen, blocks, varlen.places):
        assert all(x.device == CPU for x in layout if isinstance(x, torch.Tensor))
    assert varlen.cu_queries.tolist() == [0, 9, 13, 14, 17, 37, 47, 66, 73, 75, 79]
    assert blocks.pieces[14:].tolist() == [
        *([8, 17, 18, 0], [8, 37, 12, 18], [8, 73, 2, 30]),
        *([9, 17, 18, 0], [9, 37, 4, 18], [9, 66, 1, 22], [9, 75, 4, 23]),
    ]
    assert blocks.first_piece.tolist() == [0, 1, 3, 5, 6, 7, 9, 11, 14, 17, 21]
    assert blocks.first_reader.tolist() == [0, 3, 4, 5, 6, 12, 17, 19, 21, 22, 23]
    assert blocks.readers[:17].tolist() == [0, 1, 3, 2, 4, 5, 6, 7, 9, 11, 14, 17, 8, 10, 12, 15, 18]
    assert blocks.queries[:2].tolist() == [[6, 16], [6, 0]]  # sorted by the number of visible keys: 47, 44
    assert blocks.keys[0].tolist() == [4, 0]  # seen by the most queries


def test_an_unknown_backend_raises(monkeypatch):
    monkeypatch.setenv(attention_backends.VARIABLE, "cudnn")
    with pytest.raises(ValueError, match=r"FASTDPO_ATTENTION must be one of flash-attn-4, .*, or unset; got cudnn"):
        packed_attention(*inputs_of("grouped")[:3], ROWS)


@pytest.mark.parametrize("name", attention_flash.LIBRARIES)
def test_an_unsupported_call_raises_with_the_reason(name, monkeypatch):
    monkeypatch.setenv(attention_backends.VARIABLE, name)
    with pytest.raises(NotImplementedError, match=f"got {name}: it needs float16 or bfloat16; got torch.float32"):
        packed_attention(*inputs_of("grouped")[:3], ROWS)
    with pytest.raises(NotImplementedError, match=f"got {name}: it has no kernels for this device"):
        packed_attention(*inputs_of("grouped", torch.float16)[:3], ROWS)


def test_a_library_that_is_not_installed_raises(installed, monkeypatch):
    installed()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setenv(attention_backends.VARIABLE, "flash-attn-3")
    with pytest.raises(NotImplementedError, match=r"got flash-attn-3: ModuleNotFoundError: .*flash_attn_interface"):
        packed_attention(*inputs_of("grouped", torch.float16)[:3], ROWS)


def test_a_version_without_a_needed_parameter_raises(installed, monkeypatch):
    installed()
    module = sys.modules["flash_attn.flash_attn_interface"]
    monkeypatch.setattr(module, "_flash_attn_varlen_forward", lambda q, k, v, causal: None)
    monkeypatch.setenv(attention_backends.VARIABLE, "flash-attn-2")
    with pytest.raises(NotImplementedError, match=r"must accept alibi_slopes, cu_seqlens_k, .*; this version does not"):
        packed_attention(*inputs_of("grouped", torch.float16)[:3], ROWS)


def chosen_backends(monkeypatch, tensors, **options):
    """The backends whose results equal those of the chosen backend."""
    chosen = results(packed_attention, tensors, **options)
    equal = []
    for name in attention_backends.BACKENDS:
        monkeypatch.setenv(attention_backends.VARIABLE, name)
        with contextlib.suppress(NotImplementedError):
            others = results(packed_attention, tensors, **options)
            equal += [name] if all(torch.equal(a, b) for a, b in zip(chosen, others, strict=True)) else []
        monkeypatch.delenv(attention_backends.VARIABLE)
    return equal


def test_the_first_usable_backend_is_chosen(installed, monkeypatch, caplog):
    installed()
    tensors = inputs_of("grouped", torch.float16)
    assert chosen_backends(monkeypatch, tensors) == list(
        attention_flash.LIBRARIES
    )  # all libraries have the same stand-in
    assert chosen_backends(monkeypatch, inputs_of("grouped")) == ["triton"]  # float32
    assert not caplog.text


@pytest.mark.parametrize("wrong", ["top_left", "leaking"])
def test_a_library_that_fails_the_probe_is_disabled(wrong, installed, monkeypatch, caplog):
    installed(StandIn(**{wrong: True}))
    tensors = inputs_of("grouped", torch.float16)
    assert chosen_backends(monkeypatch, tensors) == ["triton"]
    for name in attention_flash.LIBRARIES:
        assert caplog.text.count(f"{name} is disabled: wrong values on a small case: ") == 1
