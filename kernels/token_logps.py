"""Log-probabilities of given logits at their targets.

The forward reads the logits once; the backward reads them once and writes the gradient once.

    x [N, V]  float16, bfloat16 or float32    raw logits
    y [N]     int32 or int64                  targets, -100 where nothing is scored
    z [N, V]  float32, never stored           scale * x, or cap * tanh(scale * x)

Per row, in float32, with t = z_y and m the largest z of the other entries:

    others = sum_{v != y} exp(z_v - m)             logp = log sigmoid(t - m - log others)
    total  = others + exp(t - m)                   p_v  = exp(z_v - m) / total,  1 - p_y = others / total

    mean_logits      = sum_v z_v / V               d logp / d z_v    = (v == y) - p_v
    entropy          = -sum_v p_v log p_v          d entropy / d z_v = -p_v (log p_v + entropy)
    log_sum_sq_probs = log sum_v p_v^2
    is_top1          = z_v < t for every v < y and z_v <= t for every v > y

All results are float32 [N], is_top1 is bool [N].

The sums leave the target out until the end, so neither logp nor 1 - p_y suffers from cancellation
where p_y is close to 1. Rows with target -100 are not read: their results and gradients are zero.
logp is NaN if the target is not in the vocabulary or its logit is +inf, which would otherwise hide
an overflow behind logp = 0. The gradient of such a row is NaN too, unless d loss / d logp is 0.

A head passes t separately, more precise than its logits; statistics use the logits' own z_y. A head
also takes the gradient unscaled, as a tile that it multiplies by its weight: exp(z_v - m), and
-others at y. Multiplied by -scale / total (and by 1 - tanh^2 with a cap), the tile is d logp / d x.

At the end of its pass over a row, the forward replaces m by m + log(others / NORMALIZED_SUM),
relative to which others is NORMALIZED_SUM. The tile's entry at y is then exact in 16 bits, and the
range of float16 holds the significant part of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logit_math import (
    LOG2E,
    MIN_EXPONENT,
    empty_results_by_name,
    exponentials,
    gradient_tile,
    log_sigmoid,
    rebase,
    scale_and_cap,
    slope,
    split_target,
    statistics_with_target,
    transform,
)

NORMALIZED_SUM = tl.constexpr(1024.0)

LANES = 64  # lanes of the forward's block for each warp, each with 16 bytes of logits
BLOCK_V = 4096  # columns of the backward's block
NUM_WARPS = 8


@triton.jit
def _write_tile_block(tile_ptr, logits_ptr, start, end, off_v, y, scored, V, shift, others, factor, scale, cap):
    """Writes the columns off_v in [start, end) of a row of the gradient tile, times a factor.

    Most blocks contain neither the target nor the end of the row, and take a path without tests for
    them.
    """
    if scored & (end <= V) & ((y < start) | (y >= end)):
        z = transform(tl.load(logits_ptr + off_v), scale, cap)
        tl.store(tile_ptr + off_v, factor * exponentials(z, shift, cap))
    else:
        z = transform(tl.load(logits_ptr + off_v, mask=off_v < tl.where(scored, V, 0), other=0.0), scale, cap)
        tile = factor * gradient_tile(z, off_v, y, shift, others, cap)
        tl.store(tile_ptr + off_v, tl.where(scored, tile, 0.0), mask=off_v < V)


@triton.jit(do_not_specialize=["written"])
def _token_logps_fwd_kernel(
    logits_ptr,  # [N, V], rows `stride` apart
    targets_ptr,  # [N]
    target_logits_ptr,  # [N] float32 t, or None to read it from the logits
    tile_ptr,  # [N, V] the gradient tile, rows `tile_stride` apart. May be the logits
    logps_ptr,  # [N] float32, like all results except is_top1
    shift_ptr,  # [N] m, normalized
    others_ptr,  # [N]
    total_ptr,  # [N]
    entropy_ptr,  # [N], None if not requested, like the next three
    mean_logits_ptr,
    is_top1_ptr,  # bool
    log_sum_sq_probs_ptr,
    stride,
    tile_stride,
    V,
    written,  # columns of the tile: V, or 0 for no tile, at run time, for one kernel of both
    scale,  # float or None
    cap,  # float or None
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program per row.

    LANES lanes each add VEC columns per iteration to a running maximum and running sums.

    All columns of a lane belong to one thread, so the loop needs neither shuffles nor barriers.
    They update the lane's maximum once together, which takes one exponential per column instead of
    two. After the loop, the lanes are summed up in a fixed order. The gradient tile takes a second
    loop over the row, which is then in the caches.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    y, scored = split_target(tl.load(targets_ptr + row), V)

    lane, vec = tl.arange(0, LANES)[:, None], tl.arange(0, VEC)[None, :]
    # A lane loads vectors. In rows that are not aligned for vectors, adjacent lanes load adjacent
    # scalars.
    off_tile = lane * VEC + vec if ALIGNED else vec * LANES + lane  # [LANES, VEC]
    m = tl.full([LANES], -float("inf"), tl.float32)
    before = tl.full([LANES], -float("inf"), tl.float32)  # the largest z of columns v < y
    others = tl.zeros([LANES], tl.float32)  # sum of e = exp(z - m)
    weighted = tl.zeros([LANES], tl.float32)  # sum of e (z - m)
    squares = tl.zeros([LANES], tl.float32)  # sum of e^2
    sum_z = tl.zeros([LANES], tl.float32)
    for start in range(0, tl.where(scored, V, 0), LANES * VEC):
        off_v = start + off_tile
        end = start + LANES * VEC
        # Most blocks contain neither the target nor the end of the row: they are loaded without a
        # mask.
        if (end <= V) & ((y < start) | (y >= end)):
            z = transform(tl.load(logits_ptr + off_v), scale, cap)  # [LANES, VEC]
            if mean_logits_ptr is not None:
                sum_z += tl.sum(z, 1)
        else:
            inside = off_v < V
            z = transform(tl.load(logits_ptr + off_v, mask=inside, other=0.0), scale, cap)  # 0 where not inside
            if mean_logits_ptr is not None:
                sum_z += tl.sum(z, 1)
            if is_top1_ptr is not None and (start <= y) & (y < end):
                before = tl.maximum(m, tl.max(tl.where(off_v < y, z, -float("inf")), 1))
            z = tl.where(inside & (off_v != y), z, -float("inf"))

        old, m = m, tl.maximum(m, tl.max(z, 1))
        others, weighted, squares = rebase(others, weighted, squares, old, m)
        d = z - tl.where(m == -float("inf"), 0.0, m)[:, None]  # [LANES, VEC]
        e = tl.exp2(d * LOG2E)
        others += tl.sum(e, 1)
        if entropy_ptr is not None:
            weighted += tl.sum(e * tl.maximum(d, MIN_EXPONENT), 1)
        if log_sum_sq_probs_ptr is not None:
            squares += tl.sum(e * e, 1)

    # Read after the loop: across it, both would hold registers with which a further program runs.
    x = tl.load(logits_ptr + y, mask=y >= 0, other=float("nan"))
    own = tl.where(scored, transform(x, scale, cap), 0.0)
    t = own
    if target_logits_ptr is not None:
        t = tl.where(scored, tl.load(target_logits_ptr + row), 0.0)
    t = tl.where(t == float("inf"), float("nan"), t)

    top_other = tl.max(m, 0)
    shift = top_other
    others, weighted, squares = rebase(others, weighted, squares, m, shift)
    others = tl.sum(others, 0)
    shift = tl.where(shift == -float("inf"), t, shift)  # only the target has a nonzero probability
    logps = log_sigmoid(t - shift - tl.log(others))
    tl.store(logps_ptr + row, tl.where(scored, logps, 0.0))
    if mean_logits_ptr is not None:
        tl.store(mean_logits_ptr + row, tl.sum(sum_z, 0) / V)
    if is_top1_ptr is not None:
        tl.store(is_top1_ptr + row, scored & (own >= top_other) & (own > tl.max(before, 0)))
    if entropy_ptr is not None or log_sum_sq_probs_ptr is not None:
        weighted, squares = tl.sum(weighted, 0), tl.sum(squares, 0)
        entropy, log_sum_sq_probs = statistics_with_target(others, weighted, squares, shift, own)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, tl.where(scored, entropy, 0.0))
        if log_sum_sq_probs_ptr is not None:
            tl.store(log_sum_sq_probs_ptr + row, tl.where(scored, log_sum_sq_probs, 0.0))

    normalized = shift + tl.where(others > 0, tl.log(others / NORMALIZED_SUM), 0.0)
    others *= tl.exp2((shift - normalized) * LOG2E)
    tl.store(shift_ptr + row, normalized)
    tl.store(others_ptr + row, others)
    tl.store(total_ptr + row, others + tl.exp2((t - normalized) * LOG2E))
    tile_ptr += row * tile_stride
    for start in range(0, written, LANES * VEC):
        off_v, end = start + off_tile, start + LANES * VEC
        _write_tile_block(tile_ptr, logits_ptr, start, end, off_v, y, scored, V, normalized, others, 1.0, scale, cap)


@triton.jit
def _token_logps_bwd_kernel(
    grad_ptr,  # [N, V] d loss / d x, or the gradient tile, rows `grad_stride` apart; may be the logits
    grad_logps_ptr,  # [N] float32 or None
    grad_entropy_ptr,  # [N] float32 or None. If both are None, the gradient tile is written
    logits_ptr,  # [N, V], rows `stride` apart
    targets_ptr,  # [N]
    shift_ptr,  # [N] float32, from the forward
    others_ptr,  # [N] float32, from the forward
    total_ptr,  # [N] float32, from the forward
    stride,
    grad_stride,
    V,
    scale,  # float or None
    cap,  # float or None
    BLOCK_V: tl.constexpr,
):
    """One program per block of a row, so that a few rows occupy the whole device.

    With a gradient of the entropy there is one program per row, because that gradient needs the
    entropy of the whole row first.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    grad_ptr += row * grad_stride
    y, scored = split_target(tl.load(targets_ptr + row), V)
    read = tl.where(scored, V, 0)
    shift = tl.load(shift_ptr + row)
    others = tl.load(others_ptr + row)

    gain = 1.0  # d z / d x where tanh is steepest
    if scale is not None:
        gain *= tl.cast(scale, tl.float32)
    if cap is not None:
        gain *= tl.cast(cap, tl.float32)
    tile_scale = 1.0
    if grad_logps_ptr is not None:
        upstream_logps = tl.load(grad_logps_ptr + row)
        tile_scale = tl.where(upstream_logps == 0, 0.0, -upstream_logps * gain / tl.load(total_ptr + row))
    if grad_entropy_ptr is not None:
        upstream_entropy = tl.load(grad_entropy_ptr + row) * gain
        x = tl.load(logits_ptr + y, mask=y >= 0, other=tl.where(upstream_entropy == 0, 0.0, float("nan")))
        own = tl.where(scored, transform(x, scale, cap), 0.0)
        top = tl.maximum(shift, own)
        # Sum of e = exp(z - top) over the whole vocabulary; the sum over the others is known.
        total = others * tl.exp2((shift - top) * LOG2E) + tl.exp2((own - top) * LOG2E)
        weighted = tl.zeros([BLOCK_V], tl.float32)  # sum of e (z - top)
        for start in range(0, read, BLOCK_V):
            off_v = start + tl.arange(0, BLOCK_V)
            z = transform(tl.load(logits_ptr + off_v, mask=off_v < V, other=0.0), scale, cap)
            d = tl.where(off_v < V, tl.maximum(z - top, MIN_EXPONENT), MIN_EXPONENT)
            weighted += tl.exp2(d * LOG2E) * d
        mean_d = tl.sum(weighted, 0) / total
        log_total = tl.log(total)

    for start in range(tl.program_id(1) * BLOCK_V, V, tl.num_programs(1) * BLOCK_V):
        off_v, end = start + tl.arange(0, BLOCK_V), start + BLOCK_V
        if grad_entropy_ptr is None:
            _write_tile_block(
                grad_ptr, logits_ptr, start, end, off_v, y, scored, V, shift, others, tile_scale, scale, cap
            )
        else:  # further branches would cost occupancy
            z = transform(tl.load(logits_ptr + off_v, mask=off_v < read, other=0.0), scale, cap)  # [BLOCK_V]
            grad = tl.zeros([BLOCK_V], tl.float32)
            if grad_logps_ptr is not None:
                grad += tile_scale * gradient_tile(z, off_v, y, shift, others, cap)
            d = tl.maximum(z - top, MIN_EXPONENT)
            entropy_grad = (
                upstream_entropy * tl.exp2((d - log_total) * LOG2E) * (d - mean_d)
            )  # log p + entropy is d minus its mean
            if cap is not None:
                entropy_grad *= slope(z, cap)
            grad -= entropy_grad
            tl.store(grad_ptr + off_v, tl.where(scored, grad, 0.0), mask=off_v < V)


def token_logps_fwd(
    logits: Tensor,  # [N, V], last stride 1
    targets: Tensor,  # [N]
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    statistics: str,
    target_logits: Tensor | None = None,  # [N] float32
    tile: Tensor | None = None,  # [N, V], last stride 1, overwritten; may be the logits
    warps: int | None = None,  # for each row, NUM_WARPS by default
) -> list[Tensor]:
    """logps, shift, others, total and the statistics, [N] each.

    Writes the gradient tile if one is given. With more warps, fewer rows are read at a time, and more
    of what the second pass reads again may still be in the caches.
    """
    n, vocabulary = logits.shape
    warps = warps or NUM_WARPS
    scale, cap = scale_and_cap(softcap, logit_scale, temperature)
    results = empty_results_by_name(n, statistics, logits.device)
    written, tile = (0, logits) if tile is None else (vocabulary, tile)
    with torch.cuda.device_of(logits):
        _token_logps_fwd_kernel[(n,)](
            logits,
            targets.contiguous(),
            target_logits,
            tile,
            results["logps"],
            results["shift"],
            results["others"],
            results["total"],
            results.get("entropy"),
            results.get("mean_logits"),
            results.get("is_top1"),
            results.get("log_sum_sq_probs"),
            logits.stride(0),
            tile.stride(0),
            vocabulary,
            written,
            scale,
            cap,
            LANES=LANES * warps,
            VEC=16 // logits.itemsize,
            ALIGNED=_takes_vectors(logits) and _takes_vectors(tile),
            num_warps=warps,
            enable_fp_fusion=True,
        )
    return list(results.values())


def token_logps_bwd(
    grad: Tensor,  # [N, V], last stride 1, overwritten; may be the logits
    grad_logps: Tensor | None,  # [N] float32
    grad_entropy: Tensor | None,  # [N] float32
    logits: Tensor,  # [N, V], last stride 1
    targets: Tensor,  # [N]
    sums: Sequence[Tensor],  # shift, others, total of the forward, [N] each
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> None:
    """Writes d loss / d logits to grad, or the gradient tile if no upstream gradient is given."""
    n, vocabulary = logits.shape
    programs = 1 if grad_entropy is not None else triton.cdiv(vocabulary, BLOCK_V)
    upstream = (None if g is None else g.contiguous() for g in (grad_logps, grad_entropy))
    with torch.cuda.device_of(logits):
        _token_logps_bwd_kernel[(n, programs)](
            grad,
            *upstream,
            logits,
            targets.contiguous(),
            *sums,
            logits.stride(0),
            grad.stride(0),
            vocabulary,
            *scale_and_cap(softcap, logit_scale, temperature),
            BLOCK_V=BLOCK_V,
            num_warps=NUM_WARPS,
            # Fused, z - shift would take the scaled logit before its rounding, and shift the one after.
            enable_fp_fusion=False,
        )


def _takes_vectors(rows: Tensor) -> bool:
    """Whether the compiler may load 16 bytes at once.

    Triton specializes kernels on pointers and strides that are divisible by 16.
    """
    return rows.data_ptr() % 16 == 0 and rows.stride(0) % 16 == 0
