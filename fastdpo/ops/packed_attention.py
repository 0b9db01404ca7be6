"""Attention over a packed buffer: rows see their prefix and, causally, themselves. Nothing is copied or masked.

A row's queries attend in two parts, their prefix (everything) and themselves (causal), merged by log-sum-exp:
`out = out_p exp(lse_p - lse) + out_o exp(lse_o - lse)`, `lse = log(exp(lse_p) + exp(lse_o))`. In the backward each part
is given the merged `out` and `lse`, with which the flash-attention backward (arXiv 2307.08691, algorithm 2) yields that
part's share of the whole softmax's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import checks
from .logit_rows import accumulator

OP = "packed_attention"


@torch.library.custom_op("fastdpo::packed_attention_fwd", mutates_args=())
def _fwd(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [T, H, D_v] and log-sum-exp of the scores [H, T]."""
    out, lse = _fwd_results(query, key, value, rows, scale)
    q, k, v, o = (x.transpose(0, 1)[None] for x in (query, key, value, out))  # [1, H, T, D]
    attend = _flash_fwd if _has_flash(query, value) else _math_fwd
    with torch.autocast(query.device.type, enabled=False):
        for prefix, own in _spans(rows, len(query)):
            part, part_lse = attend(q[:, :, own], k[:, :, own], v[:, :, own], True, scale)
            if prefix is not None:
                seen, seen_lse = attend(q[:, :, own], k[:, :, prefix], v[:, :, prefix], False, scale)
                whole = torch.logaddexp(part_lse, seen_lse)
                part = part * (part_lse - whole).exp()[..., None] + seen * (seen_lse - whole).exp()[..., None]
                part_lse = whole
            o[:, :, own] = part
            lse[:, own] = part_lse[0]
    return out, lse


def _fwd_results(query, key, value, rows, scale):
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    return out, query.new_empty(query.shape[1], query.shape[0], dtype=accumulator(query.dtype))


_fwd.register_fake(_fwd_results)


@torch.library.custom_op("fastdpo::packed_attention_bwd", mutates_args=())
def _bwd(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, rows: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dquery, dkey, dvalue = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    inputs = (grad, query, key, value, out, dquery, dkey, dvalue)
    g, q, k, v, o, dq, dk, dv = (x.transpose(0, 1)[None] for x in inputs)  # [1, H, T, D]
    attend = _flash_bwd if _has_flash(query, value) else _math_bwd
    for prefix, own in _spans(rows, len(query)):
        for keys in (own,) if prefix is None else (own, prefix):
            parts = attend(
                g[:, :, own],
                q[:, :, own],
                k[:, :, keys],
                v[:, :, keys],
                o[:, :, own],
                lse[None, :, own],
                keys is own,
                scale,
            )
            for total, span, part in zip((dq, dk, dv), (own, keys, keys), parts, strict=True):
                total[:, :, span] += part
    return dquery, dkey, dvalue


@_bwd.register_fake
def _(grad, query, key, value, out, lse, rows, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, rows, scale):
        out, lse = _fwd(query, key, value, rows, scale)
        ctx.save_for_backward(query, key, value, out, lse, rows)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse, rows = ctx.saved_tensors
        return *_bwd(grad, query, key, value, out, lse, rows, ctx.scale), None, None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, *, scale: float | None = None) -> Tensor:
    """Softmax attention in which a row's own tokens see the row's prefix and, causally, themselves.

    Meaning: `fastdpo.ops.reference.packed_attention`. Memory beside the result: `[H, T]` log-sum-exps. On a CPU it runs
    torch's flash attention a row at a time; elsewhere, and where `D_v != D`, plain matrix products a row at a time.

    Args:
        query: [T, H, D] floating point. Under autocast all three are cast, as in `scaled_dot_product_attention`.
        key: [T, H_kv, D], H a multiple of H_kv (grouped queries).
        value: [T, H_kv, D_v].
        rows: int32 [S, 4], `Layout.rows`: (prefix start, prefix length, own start, own length). The own tokens tile
            [0, T) in order. Best on the CPU, wherever the rest is: it is read on the host.
        scale: multiplies the scores; `D ** -0.5` if None.

    Returns:
        [T, H, D_v] in the dtype of query.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
    """
    checks.require_floating(OP, query=query, key=key, value=value)
    checks.require(query.dim() == 3, OP, "query", "be [T, H, D]", list(query.shape))
    t, h, d = query.shape
    checks.require(key.dim() == 3 and key.shape[::2] == (t, d), OP, "key", "be [{}, H_kv, {}]", list(key.shape), t, d)
    shared = key.shape[1] > 0 and h % key.shape[1] == 0
    checks.require(shared, OP, "key", "have heads in a number that divides {}", key.shape[1], h)
    fits = value.dim() == 3 and value.shape[:2] == key.shape[:2]
    checks.require(fits, OP, "value", "be [{}, {}, D_v]", list(value.shape), t, key.shape[1])
    checks.require(rows.dtype == torch.int32, OP, "rows", "be int32", rows.dtype, error=TypeError)
    checks.require(rows.dim() == 2 and rows.shape[1] == 4, OP, "rows", "be [S, 4]", list(rows.shape))
    checks.require_same_device(OP, query=query, key=key, value=value)
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    dtypes = {key.dtype, value.dtype}
    checks.require(dtypes == {query.dtype}, OP, "key and value", "be {} as query", dtypes, query.dtype, error=TypeError)
    return _PackedAttention.apply(query, key, value, rows, d**-0.5 if scale is None else scale)


def _spans(rows: Tensor, tokens: int) -> Iterator[tuple[slice | None, slice]]:
    """(prefix or None, own) of each row, checked: nothing may be read or left unwritten outside the rows."""
    end = 0
    for prefix, prefix_length, own, own_length in rows.tolist():
        tiled = own == end and own_length > 0 and prefix >= 0 and prefix_length >= 0 and prefix + prefix_length <= own
        row = (prefix, prefix_length, own, own_length)
        checks.require(tiled, OP, "rows", "tile [0, {}) in order, each after its prefix", row, tokens)
        end = own + own_length
        yield (slice(prefix, prefix + prefix_length) if prefix_length else None), slice(own, end)
    checks.require(end == tokens, OP, "rows", "tile [0, {})", f"[0, {end})", tokens)


# Two ways to attend, on [1, H, L, D]. Forward: (out, lse [1, H, L]). Backward: the gradients of q, k and v.


def _has_flash(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[2] == value.shape[2]


def _flash_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _flash_bwd(g, q, k, v, out, lse, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(g, q, k, v, out, lse, 0.0, causal, scale=scale)


def _math_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, _widen(k, q), causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ _widen(v, q), lse


def _math_bwd(g, q, k, v, out, lse, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    wide_k, wide_v = _widen(k, q), _widen(v, q)
    p = (_scores(q, wide_k, causal, scale) - lse[..., None]).exp()
    delta = (g.to(p.dtype) * out.to(p.dtype)).sum(-1, keepdim=True)
    dp = g.to(p.dtype) @ wide_v.to(p.dtype).transpose(-1, -2)  # unrounded: where a row sees one token, dp is delta
    ds = (p * (dp - delta) * scale).to(q.dtype)
    dk, dv = ds.transpose(-1, -2) @ q, p.to(g.dtype).transpose(-1, -2) @ g
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    return ds @ wide_k, dk.unflatten(1, heads).sum(2), dv.unflatten(1, heads).sum(2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(accumulator(q.dtype)) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, -torch.inf)
    return scores


def _widen(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values repeated for the query heads of their group."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
