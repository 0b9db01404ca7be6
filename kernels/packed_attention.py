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

One program computes the output of a block of queries. There are no atomics, so results are reproducible bit by
bit. Exponentials are taken in base 2. The backward is in `packed_attention_backward`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_blocks import (
    KernelConfig,
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
from .logit_math import LOG2E, transform

LN2 = tl.constexpr(0.6931471805599453)


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
        k = load_tokens(k_ptr, off_k, inside, stride_kt, D, BLOCK_D, MASKED)
        z = transform(tl.dot(q, k.T, input_precision="ieee"), scale, cap)  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            visible = inside[None, :] & is_visible(positions[:, None] - off_k[None, :], window)
            z = tl.where(visible, z, -float("inf"))
        old, m = m, tl.maximum(m, tl.max(z, 1))
        shift = tl.where(m == -float("inf"), 0.0, m)
        factor = tl.exp2(old - shift)
        p = tl.exp2(z - shift[:, None])
        total = total * factor + tl.sum(p, 1)
        v = load_tokens(v_ptr, off_k, inside, stride_vt, D_V, BLOCK_DV, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
    return acc, m, total


@triton.jit(do_not_specialize=["T", "has_sinks"])
def _packed_attention_fwd_kernel(
    out_ptr,  # [T, H, D_v] contiguous
    lse_ptr,  # [H, T] float32
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,  # [H] float32, which is read if has_sinks
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
    has_sinks,
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
    row, first = load_block(blocks_ptr)
    head = tl.program_id(1).to(tl.int64)
    before, own, own_length = load_row(rows_ptr, row)
    k_ptr += head // (H // H_KV) * stride_kh
    v_ptr += head // (H // H_KV) * stride_vh

    off_q = first + tl.arange(0, BLOCK_Q)
    inside = off_q < own_length
    q = load_tokens(q_ptr + own * stride_qt + head * stride_qh, off_q, inside, stride_qt, D, BLOCK_D, True)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    sink = tl.load(sinks_ptr + head, mask=has_sinks != 0, other=-float("inf"))  # at run time, for one kernel of both
    m = tl.zeros([BLOCK_Q], tl.float32) + sink * LOG2E
    total = tl.full([BLOCK_Q], 1.0, tl.float32)  # of a sink of -inf, the factor of the first keys makes 0

    piece, end = tl.load(first_piece_ptr + row), tl.load(first_piece_ptr + row + 1)
    while piece < end:  # a `for` would take more registers
        _, start, length, position = load_piece(pieces_ptr, piece)
        of_block = before + first - position  # of the block's first query relative to the piece's first key
        begin, masked = unmasked_range(of_block, tl.minimum(of_block, length), window, BLOCK_K)
        for MASKED in tl.static_range(2):  # most keys need no mask
            acc, m, total = _add_keys(
                acc, m, total, q, k_ptr + start * stride_kt, v_ptr + start * stride_vt,
                of_block + tl.arange(0, BLOCK_Q), masked if MASKED else begin,
                tl.minimum(of_block + BLOCK_Q, length) if MASKED else masked,
                stride_kt, stride_vt, window, scale, cap, D, D_V, BLOCK_D, BLOCK_DV, BLOCK_K, MASKED,
            )  # fmt: skip
        piece += 1
    store_tokens(out_ptr + (own * H + head) * D_V, off_q, inside, H * D_V, acc / total[:, None], D_V, BLOCK_DV)
    tl.store(lse_ptr + head * T + own + off_q, (m + tl.log2(total)) * LN2, mask=inside)


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
            lse if sinks is None else sinks,
            blocks.rows,
            blocks.pieces,
            blocks.first_piece,
            blocks.queries,
            *strides(query, key, value),
            t,
            int(sinks is not None),
            window,
            *base_2(scale, softcap),
            **head_sizes(query, key, value),
            **launch_options(config),
        )
    return out, lse
