"""What the kernels of `packed_attention` share: the blocks of a layout, block sizes, loads and masks.

Symbols are those of `packed_attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .logit_math import LOG2E


class PartialSums(NamedTuple):
    """Where several programs leave their parts of the gradients of a key. int32, on the device."""

    places: Tensor  # [number of parts] those of each token, in the order in which they are added
    first_place: Tensor  # [number of tokens + 1] where those of each token start in `places`
    tokens: Tensor  # [number of tokens], of which the last ones, at least one, are -1 and stand for nothing


class LayoutBlocks(NamedTuple):
    """The rows of a layout in blocks of queries and of keys, and the programs with the most work first.

    int32, on the device. The last ones of the rows, at least one, have no tokens. The last blocks and programs, at
    least one, are of such a row, so that they neither read nor write.
    """

    rows: Tensor  # [S + 1, 4]
    pieces: Tensor  # [P, 4]
    first_piece: Tensor  # [S + 2] where the pieces of each row start in `pieces`
    queries: Tensor  # [number of blocks, 2] for the forward: the block's row, and its first token within the row
    gradient_queries: Tensor  # [number of blocks, 2] the same for the gradient of queries
    keys: Tensor  # [number of programs, 5] row and first token of a block of keys; the range of its readers
    # that the program goes over; its first place in buffers for parts, or -1 if it goes over all of them
    readers: Tensor  # [R] the pieces that contain own keys of a row, sorted by the row
    parts: PartialSums


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
def load_tokens(ptr, off_t, inside, stride_t, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
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
def store_tokens(ptr, off_t, inside, stride_t, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    off_d = tl.arange(0, BLOCK_D)
    pointers = ptr + off_t.to(tl.int64)[:, None] * stride_t + off_d[None, :]
    tl.store(pointers, x, mask=inside[:, None] & (off_d < D)[None, :])


@triton.jit
def load_block(blocks_ptr):
    """The row of the program's block, and the block's first token within the row."""
    return tl.load(blocks_ptr + 2 * tl.program_id(0)), tl.load(blocks_ptr + 2 * tl.program_id(0) + 1)


@triton.jit
def load_row(rows_ptr, row):
    """Length of the row's prefix, start and length of its own tokens."""
    own, own_length = tl.load(rows_ptr + 4 * row + 2).to(tl.int64), tl.load(rows_ptr + 4 * row + 3)
    return tl.load(rows_ptr + 4 * row + 1), own, own_length


@triton.jit
def load_piece(pieces_ptr, piece):
    """Row, first key, length and position of a piece."""
    row, start = tl.load(pieces_ptr + 4 * piece), tl.load(pieces_ptr + 4 * piece + 1).to(tl.int64)
    return row, start, tl.load(pieces_ptr + 4 * piece + 2), tl.load(pieces_ptr + 4 * piece + 3)


@triton.jit
def is_visible(distance, window):
    """Whether a query sees a key that is `distance` positions before it."""
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return visible


@triton.jit
def unmasked_range(first, length, window, BLOCK_K: tl.constexpr):
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


def launch_options(config: KernelConfig) -> dict[str, int | bool]:
    return {
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,
    }


def strides(query: Tensor, key: Tensor, value: Tensor) -> list[int]:
    return [stride for x in (query, key, value) for stride in x.stride()[:2]]


def base_2(scale: float, softcap: float | None) -> tuple[float, float | None]:
    """The kernels' scale and cap, such that z is in base 2; cap is None without a softcap."""
    return (scale * LOG2E.value, None) if softcap is None else (scale / softcap, softcap * LOG2E.value)


def head_sizes(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    d, d_v = query.shape[2], value.shape[2]
    return {
        "H": query.shape[1],
        "H_KV": key.shape[1],
        "D": d,
        "D_V": d_v,
        "BLOCK_D": max(16, triton.next_power_of_2(d)),
        "BLOCK_DV": max(16, triton.next_power_of_2(d_v)),
    }
