"""Stand-ins for flash-attention libraries, with the parameters of their functions, in plain PyTorch."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from fastdpo.ops.attention import flash, routes
from fastdpo.ops.choice import notes
from tests.support.stand_ins import flash_sources

NEWEST = ("flash-attn 2.8.3.post2", "flash-attn-3 of August 2026", "flash-attn-4 4.0.0b36")
TILES = {"flash-attn-3": 128, "flash-attn-4": 128}
"""Tokens that a library loads at once, also behind the end of a row. The others clear what is not of the row."""
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
NEUTRAL = ("qv", "k_new", "out_", "alibi_slopes", "page_table", "block_table", "rotary_cos", "learnable_sink")
"""Arguments that must be None."""


class VarlenAttention:
    """Attention of rows of different lengths, correct or with planted faults.

    Like some libraries, it multiplies tiles: tokens behind the end of a row have probability 0, and so
    their NaN, but no finite number, reach the results of the row.

    Args:
        tile: the number of tokens of a tile.
        faults: names of what is done wrong; see where they are read.
    """

    def __init__(self, tile: int = 1, faults: tuple[str, ...] = ()) -> None:
        self.tile, self.faults = tile, faults

    def _rows(self, q, k, cu_q, cu_k, max_q, max_k):
        """Queries and keys of each row with those of its last tile, and the numbers of its own."""
        assert q.shape[2] % 8 == 0
        assert len(q) == cu_q[-1]
        assert len(k) >= cu_k[-1]  # a layout with room has further places
        for (a, b), (c, d) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
            assert b - a <= max_q
            assert d - c <= max_k
            yield slice(a, self._end(a, b, len(q))), slice(c, self._end(c, d, len(k))), b - a, d - c

    def _end(self, start: int, end: int, total: int) -> int:
        return min(start + -(-(end - start) // self.tile) * self.tile, total)

    def _scores(self, q, k, n_q, n_k, scale, window_sizes, softcap):
        """Scores [H, queries, keys] of tiles, those that are hidden, and the derivative of the softcap."""
        keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
        slope = torch.ones_like(scores)
        if softcap and "no softcap" not in self.faults:
            scores = softcap * torch.tanh(scores / softcap)
            slope = 1 - (scores / softcap) ** 2
        windowed = window_sizes[0] not in (None, -1)
        is_top_left = "top left" in self.faults or (not windowed and "top left without a window" in self.faults)
        offset = 0 if is_top_left else n_k - n_q
        queries, keys_seen = torch.arange(len(q))[:, None], torch.arange(len(k))
        distance = queries + offset - keys_seen
        behind = 1 if "one key too many" in self.faults else 0
        hidden = (distance < -behind) | (queries >= n_q) | (keys_seen >= n_k + behind)
        if windowed and "no window" not in self.faults:
            hidden |= distance > window_sizes[0]
        return scores, hidden, slope

    def forward(self, q, k, v, lengths, scale, window_sizes, softcap):
        assert q.shape[2] == k.shape[2]
        out, lse = q.new_empty(*q.shape[:2], v.shape[2]), torch.empty(q.shape[1], len(q))
        for queries, keys, n_q, n_k in self._rows(q, k, *lengths):
            scores, hidden, _ = self._scores(q[queries], k[keys], n_q, n_k, scale, window_sizes, softcap)
            values = v[keys].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
            own = slice(queries.start, queries.start + n_q)
            scores = scores[:, :n_q].masked_fill(hidden[:n_q], -torch.inf)
            lse[:, own] = scores.logsumexp(-1)
            out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, lengths, scale, window_sizes, softcap, deterministic=False):
        if softcap and "no backward with a softcap" in self.faults:
            raise AssertionError("backward does not support softcap")
        if window_sizes[0] in (None, -1) and "no backward without a window" in self.faults:
            raise AssertionError("backward needs a window")
        if deterministic and "no deterministic backward" in self.faults:
            raise AssertionError("deterministic backward not supported")
        group = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for queries, keys, n_q, n_k in self._rows(q, k, *lengths):
            scores, hidden, slope = self._scores(q[queries], k[keys], n_q, n_k, scale, window_sizes, softcap)
            p = (scores - lse[:, queries, None]).exp().masked_fill(hidden, 0)
            wide_k, wide_v = (x[keys].float().repeat_interleave(group, 1) for x in (k, v))
            g = grad[queries].float()
            delta = (g * out[queries].float()).sum(-1).t()[..., None]
            ds = p * (torch.einsum("qhd,khd->hqk", g, wide_v) - delta) * slope * scale
            own = slice(queries.start, queries.start + n_q)
            dq[own] = torch.einsum("hqk,khd->qhd", ds, wide_k)[:n_q].to(dq.dtype)
            head_dk = torch.einsum("hqk,qhd->khd", ds, q[queries].float())
            head_dv = torch.einsum("hqk,qhd->khd", p, g)
            own = slice(keys.start, keys.start + n_k)
            if "gradients of the key before" in self.faults:
                head_dk, head_dv = (x.roll(1, 0) for x in (head_dk, head_dv))
            dk[own] = head_dk.unflatten(1, (-1, group)).sum(2)[:n_k].to(dk.dtype)
            dv[own] = head_dv.unflatten(1, (-1, group)).sum(2)[:n_k].to(dv.dtype)
        return dq, dk, dv


def functions_of(library: flash_sources.Library, attention: VarlenAttention) -> dict[str, Any]:
    """A library's forward and backward, with its parameters, which compute what `attention` does."""
    forward, backward = library.signatures().items()
    of_forward, of_backward = _bound(*forward, _forward, attention), _bound(*backward, _backward, attention)
    functions = {forward[0]: of_forward, backward[0]: of_backward}
    if library.backend == "flash-attn-4":
        return functions
    return {name: types.SimpleNamespace(_init_fn=x) for name, x in functions.items()}  # as in a custom op


def _bound(name: str, signature: inspect.Signature, run: Callable, attention: VarlenAttention) -> Callable:
    def call(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return run(attention, given.arguments)

    call.__signature__, call.__name__ = signature, name  # pyright: ignore[reportFunctionMemberAccess]
    return call


def _forward(attention: VarlenAttention, given: Mapping[str, Any]) -> tuple:
    assert given.get("return_lse", True)
    assert given.get("out") is None
    return *attention.forward(given["q"], given["k"], given["v"], *_options(given)), None, None


def _backward(attention: VarlenAttention, given: Mapping[str, Any]) -> Any:
    lse = given["softmax_lse"] if "softmax_lse" in given else given["lse"]
    tensors = given["dout"], given["q"], given["k"], given["v"], given["out"], lse
    assert given["deterministic"] == torch.are_deterministic_algorithms_enabled()
    gradients = attention.backward(*tensors, *_options(given), given["deterministic"])
    if given["dq"] is None:
        return gradients
    for place, x in zip((given["dq"], given["dk"], given["dv"]), gradients, strict=True):
        place.copy_(x)
    return None


def _options(given: Mapping[str, Any]) -> tuple:
    assert given["is_causal"] if "is_causal" in given else given["causal"]
    assert not given.get("dropout_p")
    assert all(given.get(name) is None for name in NEUTRAL)
    window = given["window_size"] if "window_size" in given else (given["window_size_left"], given["window_size_right"])
    return tuple(given[name] for name in LENGTHS), given["softmax_scale"], window, given["softcap"]


def torch_functions(attention: VarlenAttention) -> tuple[Callable, Callable]:
    """With the parameters of torch 2.11 to 2.13."""

    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
    ):  # fmt: skip
        assert causal == (window_size_left == -1)
        window_sizes = (window_size_left, window_size_right)
        return *attention.forward(q, k, v, (cu_q, cu_k, max_q, max_k), scale, window_sizes, None), None, None, None

    def backward(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, unused, *,
        scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert causal == (window_size_left == -1)
        assert seed.dtype == torch.uint64
        window_sizes = (window_size_left, window_size_right)
        return attention.backward(grad, q, k, v, out, lse, (cu_q, cu_k, max_q, max_k), scale, window_sizes, None)

    return forward, backward


def install(monkeypatch: pytest.MonkeyPatch, faults: tuple[str, ...] = (), versions: tuple[str, ...] = NEWEST) -> None:
    """Replaces the libraries by stand-ins of these versions, which support the CPU."""
    for name in versions:
        library = flash_sources.recorded()[name]
        attention = VarlenAttention(TILES.get(library.backend, 1), faults)
        module = types.SimpleNamespace(**functions_of(library, attention))
        monkeypatch.setitem(sys.modules, flash.PACKAGES[library.backend].module_name, module)
    of_torch = flash.TorchFlash()
    of_torch.forward_function, of_torch.backward_function = torch_functions(VarlenAttention(1, faults))
    given = flash.LIBRARIES.items()
    libraries = {name: dataclasses.replace(library, capabilities=(None,)) for name, library in given}
    libraries["torch"] = dataclasses.replace(libraries["torch"], load_functions=lambda: of_torch)
    others = {name: x for name, x in routes.BACKENDS.items() if name not in libraries}
    monkeypatch.setattr(routes, "BACKENDS", {**libraries, **others})
    monkeypatch.setattr(notes, "builds", {})
    forget()


def forget() -> None:
    """What is known of the libraries, as in a new process."""
    flash.load.cache_clear()
    routes.passes_probe.cache_clear()
    routes.forget()
