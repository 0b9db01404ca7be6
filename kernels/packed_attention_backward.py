"""Gradients of attention over a packed buffer. Symbols and formulas are those of `packed_attention`.

One program computes the gradient of a block of queries; in the kernel of the gradients of k and v, one program takes
a block of keys and goes over the queries of its row and of all pieces that contain some of those keys, in a fixed
order. Where these are far more than the share of a program, as behind a prefix of very many rows, several programs
go over some of these readers each, and their float32 sums are added in the order of the readers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_blocks import (
    KernelConfigs,
    LayoutBlocks,
    base_2,
    head_sizes,
    is_visible,
    launch_options,
    load_block,
    load_piece,
    load_row,
    load_tokens,
    store_tokens,
    strides,
    unmasked_range,
)
from .gather_keys import sum_places
from .logit_math import LOG2E, slope, transform


@triton.jit
def _add_keys_to_dq(
    dq, q, grad, lse, delta, k_ptr, v_ptr, positions, begin, end, stride_kt, stride_vt, window, scale, cap,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of keys [begin, end) to the gradient of a block of queries."""
    for start in range(begin, end, BLOCK_K):
        off_k = start + tl.arange(0, BLOCK_K)
        inside = off_k < end
        k = load_tokens(k_ptr, off_k, inside, stride_kt, D, BLOCK_D, MASKED)
        v = load_tokens(v_ptr, off_k, inside, stride_vt, D_V, BLOCK_DV, MASKED)
        z = transform(tl.dot(q, k.T, input_precision="ieee"), scale, cap)  # [BLOCK_Q, BLOCK_K]
        p = tl.exp2(z - lse[:, None])
        if MASKED:
            p = tl.where(inside[None, :] & is_visible(positions[:, None] - off_k[None, :], window), p, 0.0)
        dz = p * (tl.dot(grad, v.T, input_precision="ieee") - delta[:, None])
        if cap is not None:
            dz *= slope(z, cap)
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["T"])
def _packed_attention_dq_kernel(
    dq_ptr,  # [T, H, D] contiguous
    out_ptr,  # [T, H, D_v] contiguous
    grad_ptr,  # [T, H, D_v] contiguous
    lse_ptr,  # [H, T] float32
    delta_ptr,  # [H, T] float32, written here
    q_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    pieces_ptr,
    first_piece_ptr,
    blocks_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    T,
    window,  # int or None
    scale,  # float, in base 2 like cap
    cap,  # float or None
    gain,  # float, d z / d q.k
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of a row's queries and query head."""
    row, first = load_block(blocks_ptr)
    head = tl.program_id(1).to(tl.int64)
    before, own, own_length = load_row(rows_ptr, row)
    k_ptr += head // (H // H_KV) * stride_kh
    v_ptr += head // (H // H_KV) * stride_vh

    off_q = first + tl.arange(0, BLOCK_Q)
    inside = off_q < own_length
    q = load_tokens(q_ptr + own * stride_qt + head * stride_qh, off_q, inside, stride_qt, D, BLOCK_D, True)
    grad = load_tokens(grad_ptr + (own * H + head) * D_V, off_q, inside, H * D_V, D_V, BLOCK_DV, True)
    lse = tl.load(lse_ptr + head * T + own + off_q, mask=inside, other=0.0) * LOG2E
    out = load_tokens(out_ptr + (own * H + head) * D_V, off_q, inside, H * D_V, D_V, BLOCK_DV, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head * T + own + off_q, delta, mask=inside)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    piece, end = tl.load(first_piece_ptr + row), tl.load(first_piece_ptr + row + 1)
    while piece < end:  # a `for` would take more registers
        _, start, length, position = load_piece(pieces_ptr, piece)
        of_block = before + first - position  # of the block's first query relative to the piece's first key
        begin, masked = unmasked_range(of_block, tl.minimum(of_block, length), window, BLOCK_K)
        for MASKED in tl.static_range(2):  # most keys need no mask
            dq = _add_keys_to_dq(
                dq, q, grad, lse, delta, k_ptr + start * stride_kt, v_ptr + start * stride_vt,
                of_block + tl.arange(0, BLOCK_Q), masked if MASKED else begin,
                tl.minimum(of_block + BLOCK_Q, length) if MASKED else masked,
                stride_kt, stride_vt, window, scale, cap, D, D_V, BLOCK_D, BLOCK_DV, BLOCK_K, MASKED,
            )  # fmt: skip
        piece += 1
    store_tokens(dq_ptr + (own * H + head) * D, off_q, inside, H * D, dq * gain, D, BLOCK_D)


@triton.jit
def _add_queries_to_dkv(
    dk, dv, k, v, q_ptr, grad_ptr, lse_ptr, delta_ptr, key_positions, valid, begin, end,
    stride_qt, window, scale, cap,
    H: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of a row's queries [begin, end) to the gradients of a block of keys.

    `key_positions` are the positions of the keys in that row, relative to its first own token; keys
    that are not `valid` are not part of it.
    """
    for start in range(begin, end, BLOCK_Q):
        off_q = start + tl.arange(0, BLOCK_Q)
        inside = off_q < end
        q = load_tokens(q_ptr, off_q, inside, stride_qt, D, BLOCK_D, True)
        grad = load_tokens(grad_ptr, off_q, inside, H * D_V, D_V, BLOCK_DV, True)
        lse = tl.load(lse_ptr + off_q, mask=inside, other=float("inf")) * LOG2E
        delta = tl.load(delta_ptr + off_q, mask=inside, other=0.0)
        z = transform(tl.dot(k, q.T, input_precision="ieee"), scale, cap)  # [BLOCK_K, BLOCK_Q]
        visible = valid[:, None] & is_visible(off_q[None, :] - key_positions[:, None], window)
        p = tl.where(visible, tl.exp2(z - lse[None, :]), 0.0)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
        dz = p * (tl.dot(v, grad.T, input_precision="ieee") - delta[None, :])
        if cap is not None:
            dz *= slope(z, cap)
        dk = tl.dot(dz.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["T"])
def _packed_attention_dkv_kernel(
    dk_ptr,  # [T, H_kv, D] contiguous
    dv_ptr,  # [T, H_kv, D_v] contiguous
    dk_parts_ptr,  # [number of parts, H_kv, D] float32, contiguous
    dv_parts_ptr,  # [number of parts, H_kv, D_v] float32, contiguous
    grad_ptr,  # [T, H, D_v] contiguous
    lse_ptr,  # [H, T] float32
    delta_ptr,  # [H, T] float32
    q_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    pieces_ptr,
    programs_ptr,
    readers_ptr,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    T,
    window,  # int or None
    scale,  # float, in base 2 like cap
    cap,  # float or None
    gain,  # float, d z / d q.k
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of a row's keys, range of its readers and key head."""
    program_ptr = programs_ptr + 5 * tl.program_id(0)
    row, first = tl.load(program_ptr), tl.load(program_ptr + 1)
    first_reader, last_reader = tl.load(program_ptr + 2), tl.load(program_ptr + 3)
    kv_head = tl.program_id(1).to(tl.int64)
    _, own, own_length = load_row(rows_ptr, row)

    off_k = first + tl.arange(0, BLOCK_K)
    inside = off_k < own_length
    k = load_tokens(k_ptr + own * stride_kt + kv_head * stride_kh, off_k, inside, stride_kt, D, BLOCK_D, True)
    v = load_tokens(v_ptr + own * stride_vt + kv_head * stride_vh, off_k, inside, stride_vt, D_V, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    last = tl.minimum(first + BLOCK_K, own_length) - 1

    for i in range(H // H_KV):
        head = kv_head * (H // H_KV) + i
        q, grad = q_ptr + head * stride_qh, grad_ptr + head * D_V
        lse, delta = lse_ptr + head * T, delta_ptr + head * T
        for reader in range(first_reader, last_reader):
            reading, piece_start, length, position = load_piece(pieces_ptr, tl.load(readers_ptr + reader))
            before, start, end = load_row(rows_ptr, reading)
            skipped = (own - piece_start).to(tl.int32)  # keys of the piece before those of the row
            position += skipped + first - before  # of the block's first key relative to the reading row's own tokens
            if window is not None:
                end = tl.minimum(end, position + last - first + window)
            end = tl.where(skipped + first < length, end, 0)  # at least one of these keys is in the piece
            dk, dv = _add_queries_to_dkv(
                dk, dv, k, v, q + start * stride_qt, grad + start * (H * D_V), lse + start, delta + start,
                position + off_k - first, inside & (skipped + off_k < length), tl.maximum(position, 0), end,
                stride_qt, window, scale, cap,
                H, D, D_V, BLOCK_D, BLOCK_DV, BLOCK_Q,
            )  # fmt: skip
    dk *= gain
    place = tl.load(program_ptr + 4)
    off_k = tl.arange(0, BLOCK_K)  # again: the ones above would take registers until here
    inside = off_k < own_length - first
    if place < 0:
        store_tokens(dk_ptr + ((own + first) * H_KV + kv_head) * D, off_k, inside, H_KV * D, dk, D, BLOCK_D)
        store_tokens(dv_ptr + ((own + first) * H_KV + kv_head) * D_V, off_k, inside, H_KV * D_V, dv, D_V, BLOCK_DV)
    else:
        store_tokens(dk_parts_ptr + kv_head * D, place + off_k, inside, H_KV * D, dk, D, BLOCK_D)
        store_tokens(dv_parts_ptr + kv_head * D_V, place + off_k, inside, H_KV * D_V, dv, D_V, BLOCK_DV)


def packed_attention_bwd(
    grad: Tensor,  # [T, H, D_v]
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: LayoutBlocks,
    configs: KernelConfigs,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    t, h, _ = query.shape
    grad, out = grad.contiguous(), out.contiguous()
    delta = torch.empty_like(lse)
    contiguous = torch.contiguous_format
    dq, dk, dv = (torch.empty_like(x, memory_format=contiguous) for x in (query, key, value))
    parts = [
        torch.empty(len(blocks.parts.places), *x.shape[1:], dtype=torch.float32, device=x.device) for x in (key, value)
    ]
    shape = head_sizes(query, key, value)
    common = (*strides(query, key, value), t, window, *base_2(scale, softcap), scale)
    with torch.cuda.device_of(query):
        operands = (grad, lse, delta, query, key, value, blocks.rows, blocks.pieces)
        _packed_attention_dq_kernel[(len(blocks.gradient_queries), h)](
            dq,
            out,
            *operands,
            blocks.first_piece,
            blocks.gradient_queries,
            *common,
            **shape,
            **launch_options(configs.query_gradient),
        )
        _packed_attention_dkv_kernel[(len(blocks.keys), key.shape[1])](
            dk,
            dv,
            *parts,
            *operands,
            blocks.keys,
            blocks.readers,
            *common,
            **shape,
            **launch_options(configs.key_gradient),
        )
        if len(blocks.parts.tokens) > 1:
            sum_places(dk, dv, *parts, *blocks.parts)
    return dq, dk, dv
