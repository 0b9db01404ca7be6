"""Attention over a packed buffer: a row sees its prefix and, causally, itself.

Keys are read in place.

    q [T, H, D], k [T, H_kv, D]    float16 or bfloat16, in the interpreter also float32; last stride 1
    v [T, H_kv, D_v]               the same
    rows [S, 4]                    int32, those of the layout, of which (_, prefix length, own start,
                                   own length) are read; the own tokens tile [0, T)
    pieces [P, 4]                  int32, contiguous keys that make up the rows, each from its first
                                   position: (row, first key, length, position of the first key)
    sinks [H]                      float32 or None
    out [T, H, D_v]                the dtype of q
    lse [H, T], delta [H, T]       float32

    z_ij    = scale * q_i.k_j, or cap * tanh(scale * q_i.k_j / cap)
    lse_i   = log(sum_j exp(z_ij) + exp(sink))        p_ij   = exp(z_ij - lse_i)        out_i = sum_j p_ij v_j
    delta_i = d out_i . out_i                         d z_ij = p_ij (d out_i . v_j - delta_i)

The positions of a row run through its prefix and then through its own tokens. The query at position
b sees the key at position a iff 0 <= b - a and, with a window, b - a < window. The algorithms are
those of FlashAttention-2 (arXiv 2307.08691), over the pieces of a row, the last of which ends with its own keys.

One program computes the output, or the gradient, of a block of queries; in the kernel of the
gradients of k and v, one program takes a block of keys and goes over the queries of its row and of
all pieces that contain some of those keys, in a fixed order. There are no atomics, so results
are reproducible bit by bit. Exponentials are taken in base 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logit_math import LOG2E, slope, transform

LN2 = tl.constexpr(0.6931471805599453)
BLOCK_T = 64  # tokens per program of the delta kernel


class LayoutBlocks(NamedTuple):
    """The rows of a layout in blocks of queries and of keys, blocks with the most work first.

    int32, on the device.
    """

    rows: Tensor  # [S, 4]
    pieces: Tensor  # [P, 4]
    first_piece: Tensor  # [S + 1] where the pieces of each row start in `pieces`
    queries: Tensor  # [number of blocks, 2] the block's row, and the block's first token within the row
    keys: Tensor  # [number of blocks, 2] the same for blocks of keys
    readers: Tensor  # [R] the pieces that contain own keys of a row, sorted by the row
    first_reader: Tensor  # [S + 1] where the readers of each row start in `readers`


class KernelConfig(NamedTuple):
    """Block sizes and launch options of one kernel. The last block of a row may be smaller."""

    block_q: int
    block_k: int
    warps: int
    stages: int


class KernelConfigs(NamedTuple):
    """The configuration of each kernel."""

    forward: KernelConfig
    query_gradient: KernelConfig
    key_gradient: KernelConfig


def kernel_configs(d: int, d_v: int, capability: int | None) -> KernelConfigs:
    """Configurations for head sizes d and d_v on NVIDIA devices of a major compute capability, or on others.

    Chosen from compiler output alone, and not timed: they use tensor cores, spill few or no registers
    and fit in shared memory.
    On devices of capability 8, 9 and 12, all but one kernel compute each product once: warps that have
    no part of a small block for themselves repeat the products of others.
    """
    size = max(d, d_v)
    if size <= 64 and capability == 9:
        return KernelConfigs(KernelConfig(128, 64, 4, 2), KernelConfig(64, 64, 4, 2), KernelConfig(64, 64, 4, 2))
    if (size <= 128 and capability == 8) or (size <= 64 and capability == 12):
        return KernelConfigs(KernelConfig(128, 32, 4, 2), KernelConfig(128, 16, 4, 2), KernelConfig(64, 64, 4, 2))
    if size <= 64:
        return KernelConfigs(KernelConfig(128, 64, 8, 3), KernelConfig(64, 32, 4, 2), KernelConfig(32, 64, 4, 2))
    if size <= 128 and capability == 9:
        return KernelConfigs(KernelConfig(64, 32, 4, 2), KernelConfig(64, 32, 4, 2), KernelConfig(64, 64, 4, 2))
    if size <= 128:
        warps, stages = (4, 2) if capability == 12 else (8, 1)
        query_gradient, key_gradient = KernelConfig(64, 32, warps, 2), KernelConfig(32, 64, warps, stages)
        return KernelConfigs(KernelConfig(64, 64, 4, 2), query_gradient, key_gradient)
    if capability == 9:
        return KernelConfigs(KernelConfig(128, 32, 8, 2), KernelConfig(128, 16, 8, 2), KernelConfig(32, 64, 8, 2))
    if capability in (8, 12):
        return KernelConfigs(*[KernelConfig(32, 32, 4, 2)] * 3)
    return KernelConfigs(KernelConfig(64, 32, 8, 2), KernelConfig(64, 16, 8, 2), KernelConfig(16, 64, 8, 1))


@triton.jit
def _load_tokens(ptr, off_t, inside, stride_t, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Tokens off_t of a [T, D] operand as [len(off_t), BLOCK_D], padded with zeros."""
    off_d = tl.arange(0, BLOCK_D)
    pointers = ptr + off_t.to(tl.int64)[:, None] * stride_t + off_d[None, :]
    if MASKED and BLOCK_D != D:
        x = tl.load(pointers, mask=inside[:, None] & (off_d < D)[None, :], other=0.0)
    elif MASKED:
        x = tl.load(pointers, mask=inside[:, None], other=0.0)
    elif BLOCK_D != D:
        x = tl.load(pointers, mask=(off_d < D)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def _store_tokens(ptr, off_t, inside, stride_t, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    off_d = tl.arange(0, BLOCK_D)
    pointers = ptr + off_t.to(tl.int64)[:, None] * stride_t + off_d[None, :]
    tl.store(pointers, x, mask=inside[:, None] & (off_d < D)[None, :])


@triton.jit
def _load_block(blocks_ptr):
    """The row of the program's block, and the block's first token within the row."""
    return tl.load(blocks_ptr + 2 * tl.program_id(0)), tl.load(blocks_ptr + 2 * tl.program_id(0) + 1)


@triton.jit
def _load_row(rows_ptr, row):
    """Length of the row's prefix, start and length of its own tokens."""
    own, own_length = tl.load(rows_ptr + 4 * row + 2).to(tl.int64), tl.load(rows_ptr + 4 * row + 3)
    return tl.load(rows_ptr + 4 * row + 1), own, own_length


@triton.jit
def _load_piece(pieces_ptr, piece):
    """Row, first key, length and position of a piece."""
    row, start = tl.load(pieces_ptr + 4 * piece), tl.load(pieces_ptr + 4 * piece + 1).to(tl.int64)
    return row, start, tl.load(pieces_ptr + 4 * piece + 2), tl.load(pieces_ptr + 4 * piece + 3)


@triton.jit
def _is_visible(distance, window):
    """Whether a query sees a key that is `distance` positions before it."""
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return visible


@triton.jit
def _unmasked_range(first, length, window, BLOCK_K: tl.constexpr):
    """Start and end of the keys out of [0, length) that a block of queries needs no mask for.

    `first` is the position of the block's first query relative to key 0. Keys before the start are
    hidden from the whole block by the window; keys from the end on are masked. Whole blocks of keys
    only.
    """
    begin = 0
    end = length // BLOCK_K * BLOCK_K
    if window is not None:
        begin = tl.maximum(first - window + 1, 0)
        end = begin
    return begin, end


@triton.jit
def _add_keys(
    acc, m, total, q, k_ptr, v_ptr, positions, begin, end, stride_kt, stride_vt, window, scale, cap,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds keys [begin, end) to a running output, maximum and sum of exponentials."""
    for start in range(begin, end, BLOCK_K):
        off_k = start + tl.arange(0, BLOCK_K)
        inside = off_k < end
        k = _load_tokens(k_ptr, off_k, inside, stride_kt, D, BLOCK_D, MASKED)
        z = transform(tl.dot(q, k.T, input_precision="ieee"), scale, cap)  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            visible = inside[None, :] & _is_visible(positions[:, None] - off_k[None, :], window)
            z = tl.where(visible, z, -float("inf"))
        old, m = m, tl.maximum(m, tl.max(z, 1))
        shift = tl.where(m == -float("inf"), 0.0, m)
        factor = tl.exp2(old - shift)
        p = tl.exp2(z - shift[:, None])
        total = total * factor + tl.sum(p, 1)
        v = _load_tokens(v_ptr, off_k, inside, stride_vt, D_V, BLOCK_DV, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
    return acc, m, total


@triton.jit
def _attend(
    acc, m, total, q, k_ptr, v_ptr, first, length, stride_kt, stride_vt, window, scale, cap,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Adds the keys [0, length) of a piece to a block's running state.

    `first` is the position of the block's first query relative to key 0.
    """
    off_q = first + tl.arange(0, BLOCK_Q)
    begin, masked = _unmasked_range(first, tl.minimum(first, length), window, BLOCK_K)
    acc, m, total = _add_keys(
        acc, m, total, q, k_ptr, v_ptr, off_q, begin, masked, stride_kt, stride_vt, window, scale, cap,
        D, D_V, BLOCK_D, BLOCK_DV, BLOCK_K, False,
    )  # fmt: skip
    return _add_keys(
        acc, m, total, q, k_ptr, v_ptr, off_q, masked, tl.minimum(first + BLOCK_Q, length), stride_kt, stride_vt,
        window, scale, cap, D, D_V, BLOCK_D, BLOCK_DV, BLOCK_K, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _packed_attention_fwd_kernel(
    out_ptr,  # [T, H, D_v] contiguous
    lse_ptr,  # [H, T] float32
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,  # [H] float32 or None
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
    row, first = _load_block(blocks_ptr)
    head = tl.program_id(1).to(tl.int64)
    before, own, own_length = _load_row(rows_ptr, row)
    k_ptr += head // (H // H_KV) * stride_kh
    v_ptr += head // (H // H_KV) * stride_vh

    off_q = first + tl.arange(0, BLOCK_Q)
    inside = off_q < own_length
    q = _load_tokens(q_ptr + own * stride_qt + head * stride_qh, off_q, inside, stride_qt, D, BLOCK_D, True)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    if sinks_ptr is not None:
        m = tl.zeros([BLOCK_Q], tl.float32) + tl.load(sinks_ptr + head) * LOG2E
        total = tl.full([BLOCK_Q], 1.0, tl.float32)
    else:
        m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)

    piece, end = tl.load(first_piece_ptr + row), tl.load(first_piece_ptr + row + 1)
    while piece < end:  # a `for` would take more registers
        _, start, length, position = _load_piece(pieces_ptr, piece)
        acc, m, total = _attend(
            acc, m, total, q, k_ptr + start * stride_kt, v_ptr + start * stride_vt, before + first - position, length,
            stride_kt, stride_vt, window, scale, cap, D, D_V, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
        piece += 1
    _store_tokens(out_ptr + (own * H + head) * D_V, off_q, inside, H * D_V, acc / total[:, None], D_V, BLOCK_DV)
    tl.store(lse_ptr + head * T + own + off_q, (m + tl.log2(total)) * LN2, mask=inside)


@triton.jit(do_not_specialize=["T"])
def _delta_kernel(
    delta_ptr,  # [H, T] float32
    out_ptr,  # [T, H, D_v] contiguous
    grad_ptr,  # [T, H, D_v] contiguous
    T,
    H: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    off_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = off_t < T
    out = _load_tokens(out_ptr + head * D_V, off_t, inside, H * D_V, D_V, BLOCK_DV, True)
    grad = _load_tokens(grad_ptr + head * D_V, off_t, inside, H * D_V, D_V, BLOCK_DV, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + head * T + off_t, delta, mask=inside)


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
        k = _load_tokens(k_ptr, off_k, inside, stride_kt, D, BLOCK_D, MASKED)
        v = _load_tokens(v_ptr, off_k, inside, stride_vt, D_V, BLOCK_DV, MASKED)
        z = transform(tl.dot(q, k.T, input_precision="ieee"), scale, cap)  # [BLOCK_Q, BLOCK_K]
        p = tl.exp2(z - lse[:, None])
        if MASKED:
            p = tl.where(inside[None, :] & _is_visible(positions[:, None] - off_k[None, :], window), p, 0.0)
        dz = p * (tl.dot(grad, v.T, input_precision="ieee") - delta[:, None])
        if cap is not None:
            dz *= slope(z, cap)
        dq = tl.dot(dz.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _attend_dq(
    dq, q, grad, lse, delta, k_ptr, v_ptr, first, length, stride_kt, stride_vt, window, scale, cap,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the keys of a piece.

    Arguments as in `_attend`.
    """
    off_q = first + tl.arange(0, BLOCK_Q)
    begin, masked = _unmasked_range(first, tl.minimum(first, length), window, BLOCK_K)
    dq = _add_keys_to_dq(
        dq, q, grad, lse, delta, k_ptr, v_ptr, off_q, begin, masked, stride_kt, stride_vt, window, scale, cap,
        D, D_V, BLOCK_D, BLOCK_DV, BLOCK_K, False,
    )  # fmt: skip
    return _add_keys_to_dq(
        dq, q, grad, lse, delta, k_ptr, v_ptr, off_q, masked, tl.minimum(first + BLOCK_Q, length), stride_kt,
        stride_vt, window, scale, cap, D, D_V, BLOCK_D, BLOCK_DV, BLOCK_K, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _packed_attention_dq_kernel(
    dq_ptr,  # [T, H, D] contiguous
    grad_ptr,  # [T, H, D_v] contiguous
    lse_ptr,  # [H, T] float32
    delta_ptr,  # [H, T] float32
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
    row, first = _load_block(blocks_ptr)
    head = tl.program_id(1).to(tl.int64)
    before, own, own_length = _load_row(rows_ptr, row)
    k_ptr += head // (H // H_KV) * stride_kh
    v_ptr += head // (H // H_KV) * stride_vh

    off_q = first + tl.arange(0, BLOCK_Q)
    inside = off_q < own_length
    q = _load_tokens(q_ptr + own * stride_qt + head * stride_qh, off_q, inside, stride_qt, D, BLOCK_D, True)
    grad = _load_tokens(grad_ptr + (own * H + head) * D_V, off_q, inside, H * D_V, D_V, BLOCK_DV, True)
    lse = tl.load(lse_ptr + head * T + own + off_q, mask=inside, other=0.0) * LOG2E
    delta = tl.load(delta_ptr + head * T + own + off_q, mask=inside, other=0.0)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    piece, end = tl.load(first_piece_ptr + row), tl.load(first_piece_ptr + row + 1)
    while piece < end:  # a `for` would take more registers
        _, start, length, position = _load_piece(pieces_ptr, piece)
        dq = _attend_dq(
            dq, q, grad, lse, delta, k_ptr + start * stride_kt, v_ptr + start * stride_vt, before + first - position,
            length, stride_kt, stride_vt, window, scale, cap, D, D_V, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K,
        )  # fmt: skip
        piece += 1
    _store_tokens(dq_ptr + (own * H + head) * D, off_q, inside, H * D, dq * gain, D, BLOCK_D)


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
        q = _load_tokens(q_ptr, off_q, inside, stride_qt, D, BLOCK_D, True)
        grad = _load_tokens(grad_ptr, off_q, inside, H * D_V, D_V, BLOCK_DV, True)
        lse = tl.load(lse_ptr + off_q, mask=inside, other=float("inf")) * LOG2E
        delta = tl.load(delta_ptr + off_q, mask=inside, other=0.0)
        z = transform(tl.dot(k, q.T, input_precision="ieee"), scale, cap)  # [BLOCK_K, BLOCK_Q]
        visible = valid[:, None] & _is_visible(off_q[None, :] - key_positions[:, None], window)
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
    grad_ptr,  # [T, H, D_v] contiguous
    lse_ptr,  # [H, T] float32
    delta_ptr,  # [H, T] float32
    q_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    pieces_ptr,
    blocks_ptr,
    readers_ptr,
    first_reader_ptr,
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
    """One program per block of a row's keys and key head."""
    row, first = _load_block(blocks_ptr)
    kv_head = tl.program_id(1).to(tl.int64)
    _, own, own_length = _load_row(rows_ptr, row)
    first_reader, last_reader = tl.load(first_reader_ptr + row), tl.load(first_reader_ptr + row + 1)

    off_k = first + tl.arange(0, BLOCK_K)
    inside = off_k < own_length
    k = _load_tokens(k_ptr + own * stride_kt + kv_head * stride_kh, off_k, inside, stride_kt, D, BLOCK_D, True)
    v = _load_tokens(v_ptr + own * stride_vt + kv_head * stride_vh, off_k, inside, stride_vt, D_V, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    last = tl.minimum(first + BLOCK_K, own_length) - 1

    for i in range(H // H_KV):
        head = kv_head * (H // H_KV) + i
        q, grad = q_ptr + head * stride_qh, grad_ptr + head * D_V
        lse, delta = lse_ptr + head * T, delta_ptr + head * T
        for reader in range(first_reader, last_reader):
            reading, piece_start, length, position = _load_piece(pieces_ptr, tl.load(readers_ptr + reader))
            before, start, end = _load_row(rows_ptr, reading)
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
    _store_tokens(dk_ptr + (own * H_KV + kv_head) * D, off_k, inside, H_KV * D, dk * gain, D, BLOCK_D)
    _store_tokens(dv_ptr + (own * H_KV + kv_head) * D_V, off_k, inside, H_KV * D_V, dv, D_V, BLOCK_DV)


def packed_attention_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: LayoutBlocks,
    config: KernelConfig,
    sinks: Tensor | None,  # [H] float32
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """out [T, H, D_v] and log-sum-exps [H, T]."""
    t, h, _ = query.shape
    d_v = value.shape[2]
    out = torch.empty(t, h, d_v, dtype=query.dtype, device=query.device)
    lse = torch.empty(h, t, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        _packed_attention_fwd_kernel[(len(blocks.queries), h)](
            out,
            lse,
            query,
            key,
            value,
            sinks,
            blocks.rows,
            blocks.pieces,
            blocks.first_piece,
            blocks.queries,
            *_strides(query, key, value),
            t,
            window,
            *_base_2(scale, softcap),
            **_shape(query, key, value),
            **_launch_options(config),
        )
    return out, lse


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
    d_v = value.shape[2]
    grad, out = grad.contiguous(), out.contiguous()
    delta = torch.empty_like(lse)
    contiguous = torch.contiguous_format
    dq, dk, dv = (torch.empty_like(x, memory_format=contiguous) for x in (query, key, value))
    shape = _shape(query, key, value)
    common = (*_strides(query, key, value), t, window, *_base_2(scale, softcap), scale)
    with torch.cuda.device_of(query):
        grid = (triton.cdiv(t, BLOCK_T), h)
        sizes = dict(H=h, D_V=d_v, BLOCK_DV=shape["BLOCK_DV"], BLOCK_T=BLOCK_T)
        _delta_kernel[grid](delta, out, grad, t, **sizes, enable_fp_fusion=True)
        operands = (grad, lse, delta, query, key, value, blocks.rows, blocks.pieces)
        _packed_attention_dq_kernel[(len(blocks.queries), h)](
            dq,
            *operands,
            blocks.first_piece,
            blocks.queries,
            *common,
            **shape,
            **_launch_options(configs.query_gradient),
        )
        _packed_attention_dkv_kernel[(len(blocks.keys), key.shape[1])](
            dk,
            dv,
            *operands,
            blocks.keys,
            blocks.readers,
            blocks.first_reader,
            *common,
            **shape,
            **_launch_options(configs.key_gradient),
        )
    return dq, dk, dv


def _launch_options(config: KernelConfig) -> dict[str, int | bool]:
    return {
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,
    }


def _strides(query: Tensor, key: Tensor, value: Tensor) -> list[int]:
    return [stride for x in (query, key, value) for stride in x.stride()[:2]]


def _base_2(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """The kernels' scale and cap, such that z is in base 2; cap is None without a softcap."""
    return (scale * LOG2E.value, None) if softcap is None else (scale / softcap, softcap * LOG2E.value)


def _shape(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    d, d_v = query.shape[2], value.shape[2]
    return {
        "H": query.shape[1],
        "H_KV": key.shape[1],
        "D": d,
        "D_V": d_v,
        "BLOCK_D": max(16, triton.next_power_of_2(d)),
        "BLOCK_DV": max(16, triton.next_power_of_2(d_v)),
    }
