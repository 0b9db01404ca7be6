"""Attention over a packed buffer: a row sees its prefix and, causally, itself.

What the tokens of an image also see ahead of themselves is computed apart (`device_layout.Rows`).

On GPUs, a backend computes the whole layout at once (`routes`). Elsewhere it is
computed in pieces without copies (`pieces`): each block of queries attends to its own row
(causally) and to each contiguous piece of its prefix, and the results are merged by their
log-sum-exps:

    lse = log(exp(lse_own) + exp(lse_prefix))
    out = out_own exp(lse_own - lse) + out_prefix exp(lse_prefix - lse)

A sink s is a further piece with out 0 and lse s. In the backward, every piece receives the merged
`out` and `lse`. The flash-attention backward (arXiv 2307.08691, algorithm 2) then returns the
piece's contribution to the gradient of the whole softmax. The gradient of a sink is `-sum_t exp(s -
lse_t) (grad_t . out_t)`.

Dimensions: T packed tokens, H query heads, H_kv key heads, D head size of queries and keys, D_v head
size of values, S rows of the layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ... import checks
from ..devices import accumulation_dtype, is_traced, is_transformed
from ..second_derivatives import gradients_of_definition
from . import definitions, routes
from .device_layout import OP, AttentionOptions
from .pieces import empty_outputs, merge
from .routes import Prepared


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
    """out [T, H, D_v] and log-sum-exps of the scores [H, T], both with the sinks included."""
    out, lse, _ = _forward(query, key, value, rows, sinks, AttentionOptions(scale, window, softcap))
    return out, lse


def _forward(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, sinks: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor, Prepared]:
    """The results of `_fwd`, and what computed them."""
    prepared = routes.prepare(query, value, rows, options)
    prepared, (out, lse) = routes.run(
        lambda call, layout: call.forward(query, key, value, sinks, layout), prepared, query, value, rows
    )
    if prepared.ahead is None:
        return out, lse, prepared
    (q, k), ahead = prepared.ahead
    seen, seen_lse, _ = _forward(query[q], key[k], value[k], ahead, None, options._replace(window=None))
    merged, lse[:, q] = merge((out[q].transpose(0, 1), lse[:, q]), (seen.transpose(0, 1), seen_lse))
    out[q] = merged.transpose(0, 1).to(out.dtype)
    return out, lse, prepared


def _empty_outputs(query, key, value, rows, sinks, scale, window, softcap):
    return empty_outputs(query, value)


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
    """Gradients of query, key, value and sinks; the last is empty if there are no sinks."""
    prepared = routes.prepare(query, value, rows, AttentionOptions(scale, window, softcap))
    gradients = _backward((grad, query, key, value, out, lse), rows, prepared)
    return *gradients, _gradient_of_sinks(grad, out, lse, sinks, query)


def _gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, query: Tensor) -> Tensor:
    if sinks is None:
        return query.new_empty(0)
    wide = lse.dtype
    p = torch.exp(sinks.to(wide)[:, None] - lse)  # [H, T]
    products = (grad.to(wide) * out.to(wide)).sum(-1)  # [T, H]; autocast would round those of `vecdot`
    return -(p * products.t()).sum(1).to(sinks.dtype)


def _backward(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], rows: Tensor, prepared: Prepared
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. The inputs are the first ones of `_bwd`."""
    grad, query, key, value, out, lse = inputs
    prepared, gradients = routes.run(lambda call, layout: call.backward(*inputs, layout), prepared, query, value, rows)
    if prepared.ahead is not None:
        (q, k), ahead = prepared.ahead
        inputs = grad[q], query[q], key[k], value[k], out[q], lse[:, q]
        options = prepared.given.options._replace(window=None)
        seen = _backward(inputs, ahead, routes.prepare(inputs[1], inputs[3], ahead, options))
        for total, tokens, gradient in zip(gradients, (q, k, k), seen, strict=True):
            total[tokens] += gradient
    return gradients


def _empty_gradients(grad, query, key, value, out, lse, rows, sinks, scale, window, softcap):
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    return *grads, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


_library = torch.library.Library("fastdpo", "FRAGMENT")


def _registered(name: str, function: Callable, fake: Callable) -> Callable:
    """A function as an operator of torch. The wrappers of `torch.library.custom_op` would take more time than it."""
    schema = name + torch.library.infer_schema(function, mutates_args=())
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fastdpo::{name}", fake, lib=_library)
    return getattr(torch.ops.fastdpo, name).default


_fwd_op = _registered("packed_attention_fwd", _fwd, _empty_outputs)
_bwd_op = _registered("packed_attention_bwd", _bwd, _empty_gradients)


class _PackedAttention(torch.autograd.Function):
    """Query, key, value and rows are those of `packed_attention`, or those of a model (see `attend`).

    Where nothing traces the call, operators would only take time. The backward then has what the forward prepared.
    """

    @staticmethod
    def forward(ctx, query, key, value, rows, sinks, options):
        ctx.options, ctx.prepared, ctx.of_model = options, None, query.dim() == 4
        tensors = _by_token(query), _by_token(key), _by_token(value)
        if is_traced():
            out, lse = _fwd_op(*tensors, rows, sinks, *options)
        else:
            out, lse, ctx.prepared = _forward(*tensors, rows, sinks, options)
        ctx.save_for_backward(query, key, value, out, lse, rows, sinks)
        return out.unsqueeze(0) if ctx.of_model else out

    @staticmethod
    def backward(ctx, grad):
        *given, out, lse, rows, sinks = ctx.saved_tensors
        if is_transformed() or (torch.is_grad_enabled() and not is_traced()):
            needs, define = ctx.needs_input_grad, functools.partial(_defined, rows, ctx.options)
            *gradients, dsinks = gradients_of_definition(define, (*given, sinks), (*needs[:3], needs[4]), [grad])
            return *gradients, None, dsinks, None
        query, key, value = map(_by_token, given)
        grad = grad.squeeze(0) if ctx.of_model else grad
        inputs = grad, query, key, value, out, lse
        if ctx.prepared is None or is_traced():
            *gradients, dsinks = _bwd_op(*inputs, rows, sinks, *ctx.options)
        else:
            gradients = _backward(inputs, rows, ctx.prepared)
            dsinks = _gradient_of_sinks(grad, out, lse, sinks, query)
        if ctx.of_model:
            gradients = (x.transpose(0, 1).unsqueeze(0) for x in gradients)
        return *gradients, None, None if sinks is None else dsinks, None


def _defined(
    rows: Tensor, options: AttentionOptions, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor]:
    """The result by the op's definition, in the dtype of its sums."""
    q, k, v = (_by_token(x).to(accumulation_dtype(x.dtype)) for x in (query, key, value))
    out = definitions.packed_attention(q, k, v, rows.flatten(0, -2), **options._asdict(), sinks=sinks).to(query.dtype)
    return (out.unsqueeze(0) if query.dim() == 4 else out,)


def _by_token(x: Tensor) -> Tensor:
    """[T, H, D] of a tensor of this shape, or of [1, H, T, D]."""
    return x if x.dim() == 3 else x.squeeze(0).transpose(0, 1)


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

    The tokens of a row whose prefix ends where the row itself ends see each other in both
    directions, as those of an image do in some models.

    Defined by `fastdpo.ops.definitions.packed_attention`.

    On GPUs it runs a library of flash attention or fastdpo's kernels (see
    `fastdpo.ops.attention.routes`). On a CPU it runs torch's flash attention, one piece of a row
    at a time. On other devices, on GPUs in float32 and float64, and with a softcap on a CPU, it
    runs plain matrix products in blocks of queries whose scores take at most 64 MiB (16 MiB on a
    CPU) or belong to one query; a few such buffers exist at a time.

    Memory in addition to the result: log-sum-exps `[H, T]`. With a window, time and memory are
    linear in the length of a row.

    Args:
        query: [T, H, D] floating point. Under autocast, query, key and value are cast as in
            `scaled_dot_product_attention`.
        key: [T, H_kv, D], with H a multiple of H_kv (grouped queries).
        value: [T, H_kv, D_v].
        rows: int32 [S, 4], `Layout.rows`: (prefix start, prefix length, own start, own length). The
            own tokens tile [0, T) in order. The prefix is the token `prefix start + prefix length -
            1` and what that token sees, `prefix length` tokens in all. It ends before the own
            tokens or with the last of them.
            On the CPU or on the device of query. The host reads it, so the CPU is preferable.
        scale: multiplies the scores; any finite number, or None for `D ** -0.5`.
        window: number of positions that a query sees, including its own (arXiv 2310.06825) and
            without those ahead; None for all.
        softcap: bounds the scores to `softcap * tanh(score / softcap)` (arXiv 2408.00118).
        sinks: [H] floating point, logits that take part in each head's softmax without a value
            (arXiv 2309.17453). Differentiable; never cast to a dtype below float32.

    Returns:
        [T, H, D_v] in the dtype of query.

    Raises:
        ValueError: a shape, device or value breaks a rule above; the message names the argument.
        TypeError: a dtype breaks a rule above; the message names the argument.
        NotImplementedError: FASTDPO_ATTENTION names a backend that does not support the call.
    """
    checks.require_tensors(OP, query=query, key=key, value=value, rows=rows)
    checks.require_tensors_or_none(OP, sinks=sinks)
    checks.require_no_dtensor(OP, query=query, key=key, value=value, rows=rows, sinks=sinks)
    checks.require_values(OP, query=query)
    checks.require_floating(OP, query=query, key=key, value=value, sinks=sinks)
    has_heads = query.dim() == 3 and 0 not in query.shape[1:]
    checks.require(has_heads, OP, "query", "be [T, H, D], H > 0, D > 0", list(query.shape))
    t, h, d = query.shape
    checks.require(key.dim() == 3 and key.shape[::2] == (t, d), OP, "key", "be [{}, H_kv, {}]", list(key.shape), t, d)
    divides = key.shape[1] > 0 and h % key.shape[1] == 0
    checks.require(divides, OP, "key", "have a number of heads that divides {}", key.shape[1], h)
    fits = value.dim() == 3 and value.shape[:2] == key.shape[:2]
    checks.require(fits, OP, "value", "be [{}, {}, D_v]", list(value.shape), t, key.shape[1])
    checks.require(rows.dtype == torch.int32, OP, "rows", "be int32", rows.dtype, error=TypeError)
    checks.require(rows.dim() == 2 and rows.shape[1] == 4, OP, "rows", "be [S, 4]", list(rows.shape))
    readable = rows.device.type == "cpu" or rows.device == query.device
    checks.require(readable, OP, "rows", "be on the CPU or the device of query ({})", rows.device, query.device)
    checks.require_finite(OP, "scale", scale, optional=True)
    checks.require_positive_integer(OP, "window", window, optional=True)
    checks.require_positive(OP, "softcap", softcap, optional=True)
    if sinks is not None:
        checks.require(sinks.shape == (h,), OP, "sinks", "be [{}], one per head of query", list(sinks.shape), h)
    checks.require_same_device(OP, query=query, key=key, value=value, sinks=sinks)
    return attend(query, key, value, rows, scale, window, softcap, sinks)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`packed_attention` of arguments that keep its rules. Only the dtypes, which autocast changes, are checked.

    Query, key and value may have the shapes that a model gives them, [1, H, T, D], and rows that of `Layout.mask`.
    The result is [1, T, H, D_v] then, and the gradients are views.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if not query.dtype == key.dtype == value.dtype:
        got = {key.dtype, value.dtype}
        raise TypeError(f"{OP}: key and value must be {query.dtype}, the dtype of query; got {got}")
    options = AttentionOptions(query.shape[-1] ** -0.5 if scale is None else scale, window, softcap)
    if is_transformed():
        return _defined(rows, options, query, key, value, sinks)[0]
    if torch.is_grad_enabled() or is_traced():
        return _PackedAttention.apply(query, key, value, rows, sinks, options)
    out, _, _ = _forward(_by_token(query), _by_token(key), _by_token(value), rows, sinks, options)
    return out.unsqueeze(0) if query.dim() == 4 else out
