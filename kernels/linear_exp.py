"""A head whose logits are never written: a product of matrices that ends in the exponential.

    h [N, D], W [V, D]  16-bit, or float32    b [V] or None    y [N] targets    z as in `token_logps`
    a [N]  float32      anchors: the targets' own logits, or the shifts of an earlier pass

    e_nv = exp(z_nv - a_n), 0 at v = y        others_n = sum_v e_nv        total_n = others_n + exp(t_n - a_n)

Anchored at a logit that is known beforehand, the exponentials need no maximum: a tile of them leaves the registers as
the gradient tile of `token_logps`, in bfloat16, which has the range of float32, or not at all if none is asked for. A
sum over the vocabulary is taken over blocks, which are added up in a fixed order.

Where some logit lies more than 78 above its row's anchor the sums may overflow. Such a row is computed again, relative
to its largest logit, by the program that adds up its blocks: slowly, but no value goes to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .token_logps import (
    LOG2E,
    NEVER,
    _gradient_tile,
    _log_sigmoid,
    _over_all_words,
    _rebase,
    _slope,
    _target,
    _transform,
    results_by_name,
    scale_and_cap,
)

LIMIT = tl.constexpr(1e34)  # exp(78): sums below it are far from overflow
LIMIT_OF_SQUARES = tl.constexpr(1e17)  # their sums too
AGAIN = {"BLOCK_V": 128, "BLOCK_D": 64}  # of a row that is computed again
NUM_WARPS = 4


class Blocks(NamedTuple):
    """How the product is cut, and how a program runs."""

    tokens: int = 128
    words: int = 128
    width: int = 64
    warps: int = 8
    stages: int = 3


@triton.jit(do_not_specialize=["N"])
def _linear_exp_kernel(
    hidden,  # [N, D] descriptor with TMA, else pointer; as the next
    weight,  # [V, D]
    bias_ptr,  # [V] or None
    targets_ptr,  # [N]
    anchors_ptr,  # [N] float32
    tile_ptr,  # [N, V] rows `tile_stride` apart, or None
    of_targets_ptr,  # [N] float32 others, for the tile's target columns; or None: 0 for now
    others_ptr,  # [N, blocks of V] float32 sums of e, or None, as those that follow: not asked for
    weighted_ptr,  # of e (z - a)
    sum_ptr,  # of z
    squares_ptr,  # of e^2
    above_ptr,  # how many words come before the target
    N,
    V,
    D,
    stride_n,
    stride_v,
    tile_stride,
    scale,  # float or None
    cap,  # float or None
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
):
    """One program a block of tokens and of words; those of the same words follow one another, for the caches."""
    blocks_n, blocks_v = tl.cdiv(N, BLOCK_N), tl.cdiv(V, BLOCK_V)
    start_n = tl.program_id(0) % blocks_n * BLOCK_N
    block_v = tl.program_id(0) // blocks_n
    start_v = block_v * BLOCK_V
    off_n, off_v = start_n + tl.arange(0, BLOCK_N), start_v + tl.arange(0, BLOCK_V)
    rows, words = off_n.to(tl.int64), off_v.to(tl.int64)
    in_n, in_v = off_n < N, off_v < V

    x = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for start_d in range(0, D, BLOCK_D):
        if TMA:
            h = hidden.load([start_n, start_d])
            w = weight.load([start_v, start_d])
        else:
            off_d = start_d + tl.arange(0, BLOCK_D)
            in_d = off_d < D
            off_h, off_w = rows[:, None] * stride_n + off_d[None, :], words[:, None] * stride_v + off_d[None, :]
            h = tl.load(hidden + off_h, mask=in_n[:, None] & in_d[None, :], other=0.0)
            w = tl.load(weight + off_w, mask=in_v[:, None] & in_d[None, :], other=0.0)
        x = tl.dot(h, w.T, x, input_precision="ieee")
    if bias_ptr is not None:
        x += tl.load(bias_ptr + off_v, mask=in_v, other=0.0).to(tl.float32)[None, :]
    z = _transform(x, scale, cap)

    a = tl.load(anchors_ptr + rows, mask=in_n, other=0.0)
    y, scored = _target(tl.load(targets_ptr + rows, mask=in_n, other=-1), V)
    is_target = off_v[None, :] == y[:, None]
    d = z - a[:, None]
    e = tl.where(in_v[None, :] & ~is_target, tl.exp2(d * LOG2E), 0.0)
    partial = rows * blocks_v + block_v
    if others_ptr is not None:
        tl.store(others_ptr + partial, tl.sum(e, 1), mask=in_n)
    if weighted_ptr is not None:
        tl.store(weighted_ptr + partial, tl.sum(e * tl.maximum(d, NEVER), 1), mask=in_n)
    if sum_ptr is not None:
        tl.store(sum_ptr + partial, tl.sum(tl.where(in_v[None, :], z, 0.0), 1), mask=in_n)
    if squares_ptr is not None:
        tl.store(squares_ptr + partial, tl.sum(e * e, 1), mask=in_n)
    if above_ptr is not None:
        before = (d > 0) | ((d == 0) & (off_v[None, :] < y[:, None]))
        above = tl.where(in_v[None, :] & ~is_target & before, 1.0, 0.0)
        tl.store(above_ptr + partial, tl.sum(above, 1), mask=in_n)

    if tile_ptr is not None:
        tile = e
        if of_targets_ptr is not None:
            of_targets = tl.load(of_targets_ptr + rows, mask=in_n, other=0.0)
            tile = tl.where(is_target, -of_targets[:, None], tile)
        if cap is not None:
            tile *= _slope(z, cap)
        tl.store(
            tile_ptr + rows[:, None] * tile_stride + off_v[None, :],
            tl.where(scored[:, None], tile, 0.0),
            mask=in_n[:, None] & in_v[None, :],
        )


@triton.jit
def _words_of_a_row(
    h_ptr, weight_ptr, bias_ptr, off_v, V, D, stride_v, scale, cap, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr
):
    """z [BLOCK_V] of one token."""
    in_v = off_v < V
    x = tl.zeros([BLOCK_V], tl.float32)
    for start_d in range(0, D, BLOCK_D):
        off_d = start_d + tl.arange(0, BLOCK_D)
        h = tl.load(h_ptr + off_d, mask=off_d < D, other=0.0).to(tl.float32)
        off_w = off_v.to(tl.int64)[:, None] * stride_v + off_d[None, :]
        w = tl.load(weight_ptr + off_w, mask=in_v[:, None] & (off_d < D)[None, :], other=0.0).to(tl.float32)
        x += tl.sum(w * h[None, :], 1)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + off_v, mask=in_v, other=0.0).to(tl.float32)
    return _transform(x, scale, cap)


@triton.jit
def _linear_exp_sums_kernel(
    logps_ptr,  # [N] float32, as all results but is_top1
    shift_ptr,
    others_ptr,
    total_ptr,
    entropy_ptr,  # [N] or None, as those that follow: not asked for
    mean_logits_ptr,
    is_top1_ptr,  # bool
    log_sum_sq_probs_ptr,
    tile_ptr,  # [N, V] rows `tile_stride` apart, of which the target's column is missing; or None
    of_blocks_ptr,  # [N, blocks of V] float32 sums of e; the next likewise, or None
    weighted_of_blocks_ptr,
    sum_of_blocks_ptr,
    squares_of_blocks_ptr,
    above_of_blocks_ptr,
    hidden_ptr,  # [N, D]
    weight_ptr,  # [V, D]
    bias_ptr,  # [V] or None
    targets_ptr,  # [N]
    anchors_ptr,  # [N] float32 t
    V,
    D,
    blocks,
    stride_n,
    stride_v,
    tile_stride,
    scale,  # float or None
    cap,  # float or None
    BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program a token."""
    row = tl.program_id(0).to(tl.int64)
    y, scored = _target(tl.load(targets_ptr + row), V)
    t = tl.where(scored, tl.load(anchors_ptr + row), 0.0)
    off = tl.arange(0, BLOCKS)
    of_row, inside = row * blocks + off, off < tl.where(scored, blocks, 0)
    others = tl.sum(tl.load(of_blocks_ptr + of_row, mask=inside, other=0.0), 0)
    zero = tl.full([], 0.0, tl.float32)
    shift, weighted, squares, sum_z, above = t, zero, zero, zero, zero
    if weighted_of_blocks_ptr is not None:
        weighted = tl.sum(tl.load(weighted_of_blocks_ptr + of_row, mask=inside, other=0.0), 0)
    if sum_of_blocks_ptr is not None:
        sum_z = tl.sum(tl.load(sum_of_blocks_ptr + of_row, mask=inside, other=0.0), 0)
    if squares_of_blocks_ptr is not None:
        squares = tl.sum(tl.load(squares_of_blocks_ptr + of_row, mask=inside, other=0.0), 0)
    if above_of_blocks_ptr is not None:
        above = tl.sum(tl.load(above_of_blocks_ptr + of_row, mask=inside, other=0.0), 0)
    if tile_ptr is not None:
        tile_ptr += row * tile_stride

    limit = LIMIT if squares_of_blocks_ptr is None else LIMIT_OF_SQUARES
    again = scored & ~(others < limit)  # NaN too
    if again:
        h_ptr = hidden_ptr + row * stride_n
        m = tl.full([BLOCK_V], -float("inf"), tl.float32)
        sums = tl.zeros([BLOCK_V], tl.float32)
        of_d = tl.zeros([BLOCK_V], tl.float32)
        of_squares = tl.zeros([BLOCK_V], tl.float32)
        for start_v in range(0, V, BLOCK_V):
            off_v = start_v + tl.arange(0, BLOCK_V)
            z = _words_of_a_row(h_ptr, weight_ptr, bias_ptr, off_v, V, D, stride_v, scale, cap, BLOCK_V, BLOCK_D)
            z = tl.where((off_v < V) & (off_v != y), z, -float("inf"))
            old, m = m, tl.maximum(m, z)
            sums, of_d, of_squares = _rebase(sums, of_d, of_squares, old, m)
            d = z - tl.where(m == -float("inf"), 0.0, m)
            d = tl.maximum(d, NEVER, propagate_nan=tl.PropagateNan.ALL)
            e = tl.exp2(d * LOG2E)
            sums += e
            of_d += e * d
            of_squares += e * e
        shift = tl.max(m, 0)
        sums, of_d, of_squares = _rebase(sums, of_d, of_squares, m, shift)
        others, weighted, squares = tl.sum(sums, 0), tl.sum(of_d, 0), tl.sum(of_squares, 0)
        shift = tl.where(shift == -float("inf"), t, shift)
        if tile_ptr is not None:
            for start_v in range(0, V, BLOCK_V):
                off_v = start_v + tl.arange(0, BLOCK_V)
                z = _words_of_a_row(h_ptr, weight_ptr, bias_ptr, off_v, V, D, stride_v, scale, cap, BLOCK_V, BLOCK_D)
                tl.store(tile_ptr + off_v, _gradient_tile(z, off_v, y, shift, others, cap), mask=off_v < V)
    elif tile_ptr is not None:
        of_target = -others
        if cap is not None:
            of_target *= _slope(t, cap)
        tl.store(tile_ptr + y, of_target, mask=y >= 0)

    logps = _log_sigmoid(t - shift - tl.log(others))
    tl.store(logps_ptr + row, tl.where(scored, logps, 0.0))
    tl.store(shift_ptr + row, shift)
    tl.store(others_ptr + row, others)
    tl.store(total_ptr + row, others + tl.exp2((t - shift) * LOG2E))
    if mean_logits_ptr is not None:
        tl.store(mean_logits_ptr + row, sum_z / V)
    if is_top1_ptr is not None:
        tl.store(is_top1_ptr + row, (y >= 0) & (above == 0.0))
    if entropy_ptr is not None or log_sum_sq_probs_ptr is not None:
        entropy, log_sum_sq_probs = _over_all_words(others, weighted, squares, shift, t)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, tl.where(scored, entropy, 0.0))
        if log_sum_sq_probs_ptr is not None:
            tl.store(log_sum_sq_probs_ptr + row, tl.where(scored, log_sum_sq_probs, 0.0))


def linear_exp_fwd(
    hidden: Tensor,  # [N, D], the last stride 1, as that of the next
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V], contiguous
    targets: Tensor,  # [N], contiguous
    target_logits: Tensor,  # [N] float32
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    statistics: str,
    tile: Tensor | None,  # [N, V], the last stride 1: filled
    blocks: Blocks,
) -> list[Tensor]:
    """logps, shift, others, total, then the statistics; each [N]."""
    (n, d), vocabulary = hidden.shape, len(weight)
    count = triton.cdiv(vocabulary, blocks.words)
    asked = {*filter(None, statistics.split(","))}
    of_blocks = {
        name: torch.empty(n, count, dtype=torch.float32, device=hidden.device) if wanted else None
        for name, wanted in {
            "others": True,
            "weighted": "entropy" in asked,
            "sum": "mean_logits" in asked,
            "squares": "log_sum_sq_probs" in asked,
            "above": "is_top1" in asked,
        }.items()
    }
    results = results_by_name(n, statistics, hidden.device)
    transform = scale_and_cap(softcap, logit_scale, temperature)
    with torch.cuda.device_of(hidden):
        _launch(hidden, weight, bias, targets, target_logits, tile, None, of_blocks, transform, blocks)
        _linear_exp_sums_kernel[(n,)](
            *(results[name] for name in ("logps", "shift", "others", "total")),
            *(results.get(name) for name in ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")),
            tile,
            *of_blocks.values(),
            hidden,
            weight,
            bias,
            targets,
            target_logits,
            vocabulary,
            d,
            count,
            hidden.stride(0),
            weight.stride(0),
            None if tile is None else tile.stride(0),
            *transform,
            BLOCKS=triton.next_power_of_2(count),
            **AGAIN,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return list(results.values())


def linear_exp_tile(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    shift: Tensor,  # [N] float32, as the next: what the forward returned
    others: Tensor,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    tile: Tensor,  # [N, V], the last stride 1: filled
    blocks: Blocks,
) -> None:
    """The gradient tile, again."""
    transform = scale_and_cap(softcap, logit_scale, temperature)
    with torch.cuda.device_of(hidden):
        _launch(hidden, weight, bias, targets, shift, tile, others, {}, transform, blocks)


def _launch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    anchors: Tensor,
    tile: Tensor | None,
    of_targets: Tensor | None,
    of_blocks: dict[str, Tensor | None],
    transform: tuple[float | None, float | None],
    blocks: Blocks,
) -> None:
    (n, d), vocabulary = hidden.shape, len(weight)
    tma = takes_descriptors(hidden) and takes_descriptors(weight)
    operands = (hidden, weight)
    if tma:
        shapes = ([blocks.tokens, blocks.width], [blocks.words, blocks.width])
        operands = [TensorDescriptor.from_tensor(x, shape) for x, shape in zip(operands, shapes, strict=True)]
    grid = (triton.cdiv(n, blocks.tokens) * triton.cdiv(vocabulary, blocks.words),)
    _linear_exp_kernel[grid](
        *operands,
        bias,
        targets,
        anchors,
        tile,
        of_targets,
        *(of_blocks.get(name) for name in ("others", "weighted", "sum", "squares", "above")),
        n,
        vocabulary,
        d,
        hidden.stride(0),
        weight.stride(0),
        None if tile is None else tile.stride(0),
        *transform,
        BLOCK_N=blocks.tokens,
        BLOCK_V=blocks.words,
        BLOCK_D=blocks.width,
        TMA=tma,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        enable_fp_fusion=True,
    )


def takes_descriptors(x: Tensor) -> bool:
    """Whether the copy engine of Hopper and later loads it: rows begin at multiples of 16 bytes."""
    if x.device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(x.device)[0] < 9:
        return False
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0
