"""Copies the keys and values of each row to contiguous memory, behind those of the row's prefix.

    key [T, H_kv, D]        float16, bfloat16 or float32, last stride 1
    value [T, H_v, D_v]     the same
    index [M]               int32, the token that each place of the result holds
    readers [M]             int32, the places that hold each token, sorted by token, then by place
    first_reader [T + 1]    int32, where the places of each token start in readers

    placed_key[m] = key[index[m]]
    d key[t]      = sum of d placed_key[m] over the places m with index[m] = t

Libraries of flash attention for sequences of variable length take keys in this form. The gradient
of a token is summed over its places in float32, in their order, and rounded once. There are no
atomics, so it is reproducible bit by bit. `sum_places` does the same for tokens whose gradient several
programs compute a part of (`packed_attention_backward`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4


@triton.jit
def _copy(out_ptr, x_ptr, place, token, stride_t, stride_h, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Copies all heads of a token to a place, BLOCK values at a time."""
    for start in tl.static_range(0, HEADS * D, BLOCK):
        off = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * stride_t + (off // D) * stride_h + off % D, mask=off < HEADS * D)
        tl.store(out_ptr + place * (HEADS * D) + off, x, mask=off < HEADS * D)


@triton.jit
def _gather_keys_fwd_kernel(
    key_out_ptr,  # [M, H_kv, D]
    value_out_ptr,  # [M, H_v, D_v]
    key_ptr,
    value_ptr,
    index_ptr,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    H_KV: tl.constexpr,
    H_V: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per place."""
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(index_ptr + place).to(tl.int64)
    _copy(key_out_ptr, key_ptr, place, token, key_stride_t, key_stride_h, H_KV, D, BLOCK)
    _copy(value_out_ptr, value_ptr, place, token, value_stride_t, value_stride_h, H_V, D_V, BLOCK)


@triton.jit
def _sum_places(grad_ptr, placed_ptr, token, first, last, readers_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the gradients of a token over its places readers[first:last]."""
    for start in tl.static_range(0, WIDTH, BLOCK):
        off = start + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for i in tl.range(first, last, loop_unroll_factor=2):  # two loads are under way
            place = tl.load(readers_ptr + i).to(tl.int64)
            total += tl.load(placed_ptr + place * WIDTH + off, mask=off < WIDTH, other=0.0).to(tl.float32)
        tl.store(grad_ptr + token * WIDTH + off, total, mask=off < tl.where(token < 0, 0, WIDTH))


@triton.jit
def _sum_places_kernel(
    key_grad_ptr,  # [T, H_kv, D]
    value_grad_ptr,  # [T, H_v, D_v]
    placed_key_ptr,  # [M, H_kv, D] gradient
    placed_value_ptr,  # [M, H_v, D_v] gradient
    readers_ptr,
    first_reader_ptr,
    tokens_ptr,  # None if every token has places
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for the key of each token that has places, and one for its value."""
    i = tl.program_id(0)
    first, last = tl.load(first_reader_ptr + i), tl.load(first_reader_ptr + i + 1)
    token = (i if tokens_ptr is None else tl.load(tokens_ptr + i)).to(tl.int64)
    if tl.program_id(1) == 0:
        _sum_places(key_grad_ptr, placed_key_ptr, token, first, last, readers_ptr, KEY_WIDTH, BLOCK)
    else:
        _sum_places(value_grad_ptr, placed_value_ptr, token, first, last, readers_ptr, VALUE_WIDTH, BLOCK)


def gather_keys_fwd(key: Tensor, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Gathered keys [M, H_kv, D] and values [M, H_v, D_v], contiguous."""
    (_, h_kv, d), (_, h_v, d_v) = key.shape, value.shape
    places = index.shape[0]
    placed_key, placed_value = key.new_empty(places, h_kv, d), value.new_empty(places, h_v, d_v)
    with torch.cuda.device_of(key):
        _gather_keys_fwd_kernel[(places,)](
            placed_key,
            placed_value,
            key,
            value,
            index,
            *key.stride()[:2],
            *value.stride()[:2],
            H_KV=h_kv,
            H_V=h_v,
            D=d,
            D_V=d_v,
            BLOCK=_block(max(h_kv * d, h_v * d_v)),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return placed_key, placed_value


def gather_keys_bwd(
    placed_key: Tensor,  # [M, H_kv, D] gradient, contiguous
    placed_value: Tensor,  # [M, H_v, D_v] gradient, contiguous
    readers: Tensor,
    first_reader: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of key [T, H_kv, D] and value [T, H_v, D_v]."""
    tokens = first_reader.shape[0] - 1
    key_grad, value_grad = (x.new_empty(tokens, *x.shape[1:]) for x in (placed_key, placed_value))
    sum_places(key_grad, value_grad, placed_key, placed_value, readers, first_reader)
    return key_grad, value_grad


def sum_places(
    key_grad: Tensor,  # [T, H_kv, D], contiguous
    value_grad: Tensor,  # [T, H_v, D_v], contiguous
    placed_key: Tensor,  # [M, H_kv, D] gradient, contiguous
    placed_value: Tensor,  # [M, H_v, D_v] gradient, contiguous
    readers: Tensor,
    first_reader: Tensor,
    tokens: Tensor | None = None,  # int32, those that have places, or -1 for none; None if all have
) -> None:
    """Writes the gradients of the tokens that have places."""
    widths = [math.prod(x.shape[1:]) for x in (key_grad, value_grad)]
    with torch.cuda.device_of(placed_key):
        _sum_places_kernel[(first_reader.shape[0] - 1, 2)](
            key_grad,
            value_grad,
            placed_key,
            placed_value,
            readers,
            first_reader,
            tokens,
            KEY_WIDTH=widths[0],
            VALUE_WIDTH=widths[1],
            BLOCK=_block(max(widths)),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def _block(width: int) -> int:
    """A power of two: eight values per thread, or fewer for narrow rows."""
    return min(1 << (width - 1).bit_length(), NUM_WARPS * 32 * 8)
