"""A head whose logits are never written: a matrix product with the exponential in its epilogue.

    h [N, D], W [V, D]  float16, bfloat16 or float32    hidden states and weight
    b [V]               the same, or None               bias
    y [N]               int32 or int64                  targets
    a [N]               float32                         anchors: the targets' logits, or the shifts of an earlier pass
    z [N, V]            float32, never stored           logits, transformed as in `token_logps`

    e_nv = exp(z_nv - a_n), 0 at v = y        others_n = sum_v e_nv        total_n = others_n + exp(t_n - a_n)

The anchor is known before the product, so the exponentials need no maximum. They leave the
registers as the gradient tile of `token_logps` in bfloat16, which has the range of float32, or not
at all if no tile is requested. Sums over the vocabulary are taken per block of columns, and the
blocks are added up in a fixed order.

If a logit exceeds its row's anchor by more than 78, the sums may overflow. The program that adds up
the blocks of such a row recomputes it relative to its largest logit. That is slow, but needs no
synchronization with the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .logit_math import (
    LOG2E,
    MIN_EXPONENT,
    empty_results_by_name,
    gradient_tile,
    log_sigmoid,
    rebase,
    scale_and_cap,
    slope,
    split_target,
    statistics_with_target,
    transform,
)

SUM_LIMIT = tl.constexpr(1e34)  # exp(78): smaller sums are far from overflow
SQUARES_SUM_LIMIT = tl.constexpr(1e17)  # the same for sums of squares
NO_LOGIT = tl.constexpr(1e30)  # above every logit: exponentials relative to it are 0
RECOMPUTE_BLOCKS = {"BLOCK_V": 128, "BLOCK_D": 64}  # block sizes for rows that are recomputed
STATISTICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")  # that these kernels can compute
NUM_WARPS = 4


class FusedConfig(NamedTuple):
    """Block sizes and launch options of the product.

    A head table lists them as `Entry.blocks`.
    """

    block_n: int = 128
    block_v: int = 128
    block_d: int = 64
    warps: int = 8
    stages: int = 3


@triton.jit(do_not_specialize=["N"])
def _linear_exp_kernel(
    hidden,  # [N, D] tensor descriptor with TMA, otherwise a pointer
    weight,  # [V, D] the same
    bias_ptr,  # [V] or None
    targets_ptr,  # [N]
    anchors_ptr,  # [N] float32
    tile_ptr,  # [N, V] rows `tile_stride` apart, or None
    target_sums_ptr,  # [N] float32 others, written negated to the target column; None writes 0 there
    others_ptr,  # [N, blocks of V] float32 sums of e. This and the next four are None if not requested
    weighted_ptr,  # sums of e (z - a)
    sum_ptr,  # sums of z
    squares_ptr,  # sums of e^2
    above_ptr,  # how many vocabulary entries rank before the target
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
    """One program per block of tokens and of vocabulary entries.

    Programs of the same vocabulary entries are adjacent, so that the caches hold their part of the
    weight.
    """
    blocks_n, blocks_v = tl.cdiv(N, BLOCK_N), tl.cdiv(V, BLOCK_V)
    start_n = tl.program_id(0) % blocks_n * BLOCK_N
    block_v = tl.program_id(0) // blocks_n
    start_v = block_v * BLOCK_V
    off_n, off_v = start_n + tl.arange(0, BLOCK_N), start_v + tl.arange(0, BLOCK_V)
    rows, columns = off_n.to(tl.int64), off_v.to(tl.int64)
    in_n, in_v = off_n < N, off_v < V

    x = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for start_d in range(0, D, BLOCK_D):
        if TMA:
            h = hidden.load([start_n, start_d])
            w = weight.load([start_v, start_d])
        else:
            off_d = start_d + tl.arange(0, BLOCK_D)
            in_d = off_d < D
            off_h, off_w = rows[:, None] * stride_n + off_d[None, :], columns[:, None] * stride_v + off_d[None, :]
            h = tl.load(hidden + off_h, mask=in_n[:, None] & in_d[None, :], other=0.0)
            w = tl.load(weight + off_w, mask=in_v[:, None] & in_d[None, :], other=0.0)
        x = tl.dot(h, w.T, x, input_precision="ieee")
    if bias_ptr is not None:
        x += tl.load(bias_ptr + off_v, mask=in_v, other=0.0).to(tl.float32)[None, :]
    z = transform(x, scale, cap)

    a = tl.load(anchors_ptr + rows, mask=in_n, other=0.0)
    y, scored = split_target(tl.load(targets_ptr + rows, mask=in_n, other=-1), V)
    is_target = off_v[None, :] == y[:, None]
    d = z - a[:, None]
    e = tl.where(in_v[None, :] & ~is_target, tl.exp2(d * LOG2E), 0.0)
    partial = rows * blocks_v + block_v
    if others_ptr is not None:
        tl.store(others_ptr + partial, tl.sum(e, 1), mask=in_n)
    if weighted_ptr is not None:
        tl.store(weighted_ptr + partial, tl.sum(e * tl.maximum(d, MIN_EXPONENT), 1), mask=in_n)
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
        if target_sums_ptr is not None:
            target_sums = tl.load(target_sums_ptr + rows, mask=in_n, other=0.0)
            tile = tl.where(is_target, -target_sums[:, None], tile)
        if cap is not None:
            tile *= slope(z, cap)
        tl.store(
            tile_ptr + rows[:, None] * tile_stride + off_v[None, :],
            tl.where(scored[:, None], tile, 0.0),
            mask=in_n[:, None] & in_v[None, :],
        )


@triton.jit
def _row_logits(
    h_ptr, weight_ptr, bias_ptr, off_v, V, D, stride_v, scale, cap, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Logits z [BLOCK_V] of one token."""
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
    return transform(x, scale, cap)


@triton.jit
def _linear_exp_sums_kernel(
    logps_ptr,  # [N] float32, like all results except is_top1
    shift_ptr,
    others_ptr,
    total_ptr,
    entropy_ptr,  # [N], None if not requested, like the next three
    mean_logits_ptr,
    is_top1_ptr,  # bool
    log_sum_sq_probs_ptr,
    tile_ptr,  # [N, V] rows `tile_stride` apart, complete except for the target's column; or None
    others_block_sums_ptr,  # [N, blocks of V] float32 sums of e. The next four are None if not requested
    weighted_block_sums_ptr,  # sums of e (z - a)
    sum_block_sums_ptr,  # sums of z
    squares_block_sums_ptr,  # sums of e^2
    above_block_sums_ptr,  # numbers of entries that rank before the target
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
    """One program per token."""
    row = tl.program_id(0).to(tl.int64)
    y, scored = split_target(tl.load(targets_ptr + row), V)
    t = tl.where(scored, tl.load(anchors_ptr + row), 0.0)
    off = tl.arange(0, BLOCKS)
    block_offsets, inside = row * blocks + off, off < tl.where(scored, blocks, 0)
    others = tl.sum(tl.load(others_block_sums_ptr + block_offsets, mask=inside, other=0.0), 0)
    zero = tl.full([], 0.0, tl.float32)
    shift, weighted, squares, sum_z, above = t, zero, zero, zero, zero
    if weighted_block_sums_ptr is not None:
        weighted = tl.sum(tl.load(weighted_block_sums_ptr + block_offsets, mask=inside, other=0.0), 0)
    if sum_block_sums_ptr is not None:
        sum_z = tl.sum(tl.load(sum_block_sums_ptr + block_offsets, mask=inside, other=0.0), 0)
    if squares_block_sums_ptr is not None:
        squares = tl.sum(tl.load(squares_block_sums_ptr + block_offsets, mask=inside, other=0.0), 0)
    if above_block_sums_ptr is not None:
        above = tl.sum(tl.load(above_block_sums_ptr + block_offsets, mask=inside, other=0.0), 0)
    if tile_ptr is not None:
        tile_ptr += row * tile_stride

    limit = SUM_LIMIT if squares_block_sums_ptr is None else SQUARES_SUM_LIMIT
    # Computing a row again reads the whole weight in one program. A row with NaN stays NaN, by its total:
    # its other sums are such that its gradient tile is finite.
    is_nan = scored & (others != others) & (t != -float("inf"))
    overflows = scored & ~(others < limit) & ~is_nan
    shift = tl.where(is_nan, NO_LOGIT, shift)
    others = tl.where(is_nan, 1.0, others)
    if overflows:
        h_ptr = hidden_ptr + row * stride_n
        m = tl.full([BLOCK_V], -float("inf"), tl.float32)
        sums = tl.zeros([BLOCK_V], tl.float32)
        weighted_sums = tl.zeros([BLOCK_V], tl.float32)
        squares_sums = tl.zeros([BLOCK_V], tl.float32)
        for start_v in range(0, V, BLOCK_V):
            off_v = start_v + tl.arange(0, BLOCK_V)
            z = _row_logits(h_ptr, weight_ptr, bias_ptr, off_v, V, D, stride_v, scale, cap, BLOCK_V, BLOCK_D)
            z = tl.where((off_v < V) & (off_v != y), z, -float("inf"))
            old, m = m, tl.maximum(m, z)
            sums, weighted_sums, squares_sums = rebase(sums, weighted_sums, squares_sums, old, m)
            d = z - tl.where(m == -float("inf"), 0.0, m)
            d = tl.maximum(d, MIN_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
            e = tl.exp2(d * LOG2E)
            sums += e
            weighted_sums += e * d
            squares_sums += e * e
        shift = tl.max(m, 0)
        sums, weighted_sums, squares_sums = rebase(sums, weighted_sums, squares_sums, m, shift)
        others, weighted, squares = tl.sum(sums, 0), tl.sum(weighted_sums, 0), tl.sum(squares_sums, 0)
        shift = tl.where(shift == -float("inf"), t, shift)
        if tile_ptr is not None:
            for start_v in range(0, V, BLOCK_V):
                off_v = start_v + tl.arange(0, BLOCK_V)
                z = _row_logits(h_ptr, weight_ptr, bias_ptr, off_v, V, D, stride_v, scale, cap, BLOCK_V, BLOCK_D)
                tl.store(tile_ptr + off_v, gradient_tile(z, off_v, y, shift, others, cap), mask=off_v < V)
    elif tile_ptr is not None:
        for start_v in range(0, tl.where(is_nan, V, 0), BLOCK_V):
            off_v = start_v + tl.arange(0, BLOCK_V)
            tl.store(tile_ptr + off_v, tl.zeros([BLOCK_V], tl.float32), mask=(off_v < V) & (off_v != y))
        target_entry = -others
        if cap is not None:
            target_entry *= slope(t, cap)
        tl.store(tile_ptr + y, target_entry, mask=y >= 0)

    nan = tl.where(is_nan, float("nan"), 0.0)
    logps = log_sigmoid(t - shift - tl.log(others)) + nan
    tl.store(logps_ptr + row, tl.where(scored, logps, 0.0))
    tl.store(shift_ptr + row, shift)
    tl.store(others_ptr + row, others)
    tl.store(total_ptr + row, others + tl.exp2((t - shift) * LOG2E) + nan)
    if mean_logits_ptr is not None:
        tl.store(mean_logits_ptr + row, sum_z / V)
    if is_top1_ptr is not None:
        tl.store(is_top1_ptr + row, (y >= 0) & (above == 0.0))
    if entropy_ptr is not None or log_sum_sq_probs_ptr is not None:
        entropy, log_sum_sq_probs = statistics_with_target(others, weighted, squares, shift, t)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, tl.where(scored, entropy + nan, 0.0))
        if log_sum_sq_probs_ptr is not None:
            tl.store(log_sum_sq_probs_ptr + row, tl.where(scored, log_sum_sq_probs + nan, 0.0))


def linear_exp_fwd(
    hidden: Tensor,  # [N, D], last stride 1
    weight: Tensor,  # [V, D], last stride 1
    bias: Tensor | None,  # [V], contiguous
    targets: Tensor,  # [N], contiguous
    target_logits: Tensor,  # [N] float32
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    statistics: str,
    tile: Tensor | None,  # [N, V], last stride 1, overwritten
    config: FusedConfig,
) -> list[Tensor]:
    """logps, shift, others, total and the statistics, [N] each.

    Writes the gradient tile if one is given.
    """
    (n, d), vocabulary = hidden.shape, len(weight)
    count = triton.cdiv(vocabulary, config.block_v)
    requested = {*filter(None, statistics.split(","))}
    block_sums = {
        name: torch.empty(n, count, dtype=torch.float32, device=hidden.device) if wanted else None
        for name, wanted in {
            "others": True,
            "weighted": "entropy" in requested,
            "sum": "mean_logits" in requested,
            "squares": "log_sum_sq_probs" in requested,
            "above": "is_top1" in requested,
        }.items()
    }
    results = empty_results_by_name(n, statistics, hidden.device)
    scale_cap = scale_and_cap(softcap, logit_scale, temperature)
    with torch.cuda.device_of(hidden):
        _launch(hidden, weight, bias, targets, target_logits, tile, None, block_sums, scale_cap, config)
        _linear_exp_sums_kernel[(n,)](
            *(results[name] for name in ("logps", "shift", "others", "total")),
            *(results.get(name) for name in STATISTICS),
            tile,
            *block_sums.values(),
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
            *scale_cap,
            BLOCKS=triton.next_power_of_2(count),
            **RECOMPUTE_BLOCKS,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return list(results.values())


def linear_exp_tile(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    shift: Tensor,  # [N] float32, from the forward
    others: Tensor,  # [N] float32, from the forward
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    tile: Tensor,  # [N, V], last stride 1, overwritten
    config: FusedConfig,
) -> None:
    """Writes the gradient tile from the sums of an earlier pass."""
    scale_cap = scale_and_cap(softcap, logit_scale, temperature)
    with torch.cuda.device_of(hidden):
        _launch(hidden, weight, bias, targets, shift, tile, others, {}, scale_cap, config)


def _launch(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    anchors: Tensor,
    tile: Tensor | None,
    target_sums: Tensor | None,
    block_sums: dict[str, Tensor | None],
    scale_cap: tuple[float | None, float | None],
    config: FusedConfig,
) -> None:
    (n, d), vocabulary = hidden.shape, len(weight)
    tma = takes_descriptors(hidden) and takes_descriptors(weight)
    operands = (hidden, weight)
    if tma:
        shapes = ([config.block_n, config.block_d], [config.block_v, config.block_d])
        operands = [TensorDescriptor.from_tensor(x, shape) for x, shape in zip(operands, shapes, strict=True)]
    grid = (triton.cdiv(n, config.block_n) * triton.cdiv(vocabulary, config.block_v),)
    _linear_exp_kernel[grid](
        *operands,
        bias,
        targets,
        anchors,
        tile,
        target_sums,
        *(block_sums.get(name) for name in ("others", "weighted", "sum", "squares", "above")),
        n,
        vocabulary,
        d,
        hidden.stride(0),
        weight.stride(0),
        None if tile is None else tile.stride(0),
        *scale_cap,
        BLOCK_N=config.block_n,
        BLOCK_V=config.block_v,
        BLOCK_D=config.block_d,
        TMA=tma,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
    )


def takes_descriptors(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can load x.

    It exists from Hopper on and needs rows that start at multiples of 16 bytes.
    """
    if x.device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(x.device)[0] < 9:
        return False
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0
