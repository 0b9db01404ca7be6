"""Attention over a packed buffer: rows see their prefix and, causally, themselves.

GPUs compute a whole layout at once (`attention_backends`). Elsewhere it is computed in pieces, and nothing is copied:
a row's queries attend in two parts, themselves (causal) and their prefix (everything), merged by log-sum-exp:
`out = out_o exp(lse_o - lse) + out_p exp(lse_p - lse)`, `lse = log(exp(lse_o) + exp(lse_p))`. A sink s is a third part,
whose out is 0 and whose lse is s. In the backward each part is given the merged `out` and `lse`, with which the
flash-attention backward (arXiv 2307.08691, algorithm 2) yields that part's share of the whole softmax's gradient; that
of a sink is `-sum_t exp(s - lse_t) (grad_t . out_t)`. A window cuts the queries into blocks: `attention_pieces.blocks`.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from . import checks
from .attention_backends import backend
from .attention_flash import Options, takes_scale, with_sinks, words_together
from .attention_pieces import Flash, Math, blocks
from .dtypes import accumulation_dtype

OP = "packed_attention"


@torch.library.custom_op("fastdpo::packed_attention_fwd", mutates_args=())
def _fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D_v] and log-sum-exp of the scores [H, T], sinks among them."""
    whole = backend(query, value, rows, Options(scale, window, softcap))
    if whole is not None:
        return whole.forward(query, key, value, sinks)
    out, lse = _fwd_results(query, key, value, rows, sinks, scale, window, softcap)
    inputs = (*map(words_together, (query, key, value)), out)  # torch's flash attention assumes it, without a check
    q, k, v, o = (x.transpose(0, 1)[None] for x in inputs)  # [1, H, T, D]
    attend = _way(query, value, scale, window, softcap)
    with torch.autocast(query.device.type, enabled=False):
        for at, keys in blocks(OP, rows, len(query), attend.window, attend.room):
            queries = q[:, :, at]
            parts = [attend.forward(queries, k[:, :, seen], v[:, :, seen], offset) for seen, offset in keys]
            part, part_lse = reduce(_merge, parts)
            o[:, :, at] = part
            lse[None, :, at] = part_lse
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def _fwd_results(query, key, value, rows, sinks, scale, window, softcap):
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    return out, query.new_empty(query.shape[1], query.shape[0], dtype=accumulation_dtype(query.dtype))


_fwd.register_fake(_fwd_results)


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of both."""
    (out, lse), (other, other_lse) = a, b
    share = torch.sigmoid(other_lse - lse)[..., None]
    return torch.lerp(out.to(lse.dtype), other.to(lse.dtype), share), torch.logaddexp(lse, other_lse)


@torch.library.custom_op("fastdpo::packed_attention_bwd", mutates_args=())
def _bwd(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks, the last empty where there are none."""
    whole = backend(query, value, rows, Options(scale, window, softcap))
    if whole is not None:
        gradients = whole.backward(grad, query, key, value, out, lse)
    else:
        gradients = _bwd_in_pieces(grad, query, key, value, out, lse, rows, scale, window, softcap)
    dsinks = query.new_empty(0)
    if sinks is not None:
        wide = lse.dtype
        p = torch.exp(sinks.to(wide)[:, None] - lse)  # [H, T]
        dsinks = -(p * torch.linalg.vecdot(grad.to(wide), out.to(wide)).t()).sum(1).to(sinks.dtype)
    return *gradients, dsinks


def _bwd_in_pieces(grad, query, key, value, out, lse, rows, scale, window, softcap) -> tuple[Tensor, Tensor, Tensor]:
    dquery = torch.zeros_like(query, memory_format=torch.contiguous_format)
    dkey, dvalue = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (key, value))  # of many parts
    inputs = (*map(words_together, (grad, query, key, value, out)), dquery, dkey, dvalue)
    g, q, k, v, o, dq, dk, dv = (x.transpose(0, 1)[None] for x in inputs)  # [1, H, T, D]
    attend = _way(query, value, scale, window, softcap)
    with torch.autocast(query.device.type, enabled=False):
        for at, keys in blocks(OP, rows, len(query), attend.window, attend.room):
            grads, queries, outs, lses = (x[:, :, at] for x in (g, q, o, lse[None]))
            for seen, offset in keys:
                parts = attend.backward(grads, queries, outs, lses, k[:, :, seen], v[:, :, seen], offset)
                for total, span, part in zip((dq, dk, dv), (at, seen, seen), parts, strict=True):
                    total[:, :, span].add_(part)
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype)


@_bwd.register_fake
def _(grad, query, key, value, out, lse, rows, sinks, scale, window, softcap):
    of_tensors = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    return *of_tensors, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, rows, sinks, scale, window, softcap):
        out, lse = _fwd(query, key, value, rows, sinks, scale, window, softcap)
        ctx.save_for_backward(query, key, value, out, lse, rows, sinks)
        ctx.options = scale, window, softcap
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse, rows, sinks = ctx.saved_tensors
        dquery, dkey, dvalue, dsinks = _bwd(grad, query, key, value, out, lse, rows, sinks, *ctx.options)
        return dquery, dkey, dvalue, None, None if sinks is None else dsinks, None, None, None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention in which a row's own tokens see the row's prefix and, causally, themselves.

    Meaning: `fastdpo.ops.reference.packed_attention`. On GPUs it runs torch's flash attention or fastdpo's kernels
    (`fastdpo.ops.attention_backends` says which, and when); on a CPU torch's flash attention, a piece of a row at a
    time. Elsewhere, and with a softcap on a CPU, plain matrix products, in blocks of queries whose scores take at most
    64 MiB (16 on a CPU) or are one query's; a few such buffers at a time. Memory beside the result: `[H, T]`
    log-sum-exps. With a window, time and memory are linear in the length of a row.

    Args:
        query: [T, H, D] floating point. Under autocast all three are cast, as in `scaled_dot_product_attention`.
        key: [T, H_kv, D], H a multiple of H_kv (grouped queries).
        value: [T, H_kv, D_v].
        rows: int32 [S, 4], `Layout.rows`: (prefix start, prefix length, own start, own length). The own tokens tile
            [0, T) in order. A prefix is the first tokens of its sequence. On the CPU or on the device of query. Best on
            the CPU, wherever the rest is: it is read on the host.
        scale: multiplies the scores; any finite number, `D ** -0.5` if None.
        window: how many positions a query sees, its own among them (arXiv 2310.06825); all before it if None.
        softcap: bounds the scores by `softcap * tanh(score / softcap)` (arXiv 2408.00118).
        sinks: [H] floating point, logits that take part in each head's softmax without a value (arXiv 2309.17453).
            Differentiable; never cast below float32.

    Returns:
        [T, H, D_v] in the dtype of query.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
    """
    checks.require_floating(OP, query=query, key=key, value=value, sinks=sinks)
    checks.require(query.dim() == 3, OP, "query", "be [T, H, D]", list(query.shape))
    t, h, d = query.shape
    checks.require(key.dim() == 3 and key.shape[::2] == (t, d), OP, "key", "be [{}, H_kv, {}]", list(key.shape), t, d)
    shared = key.shape[1] > 0 and h % key.shape[1] == 0
    checks.require(shared, OP, "key", "have heads in a number that divides {}", key.shape[1], h)
    fits = value.dim() == 3 and value.shape[:2] == key.shape[:2]
    checks.require(fits, OP, "value", "be [{}, {}, D_v]", list(value.shape), t, key.shape[1])
    checks.require(rows.dtype == torch.int32, OP, "rows", "be int32", rows.dtype, error=TypeError)
    checks.require(rows.dim() == 2 and rows.shape[1] == 4, OP, "rows", "be [S, 4]", list(rows.shape))
    readable = rows.device.type == "cpu" or rows.device == query.device
    checks.require(readable, OP, "rows", "be on the CPU or the device of query ({})", rows.device, query.device)
    finite = scale is None or -torch.inf < scale < torch.inf
    checks.require(finite, OP, "scale", "be finite or None", scale)
    whole = window is None or isinstance(window, int)
    checks.require(whole, OP, "window", "be an int or None", window, error=TypeError)
    checks.require(window is None or window >= 1, OP, "window", "be at least 1 or None", window)
    checks.require(softcap is None or softcap > 0, OP, "softcap", "be positive or None", softcap)
    if sinks is not None:
        checks.require(sinks.shape == (h,), OP, "sinks", "be [{}], one a head of query", list(sinks.shape), h)
    checks.require_same_device(OP, query=query, key=key, value=value, sinks=sinks)
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    dtypes = {key.dtype, value.dtype}
    checks.require(dtypes == {query.dtype}, OP, "key and value", "be {} as query", dtypes, query.dtype, error=TypeError)
    return _PackedAttention.apply(query, key, value, rows, sinks, d**-0.5 if scale is None else scale, window, softcap)


def _way(query: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None) -> Flash | Math:
    window = len(query) if window is None else min(window, len(query))
    if query.device.type == "cpu" and softcap is None and takes_scale(scale):
        return Flash(query, value, window, scale)
    return Math(query, window, scale, softcap)
