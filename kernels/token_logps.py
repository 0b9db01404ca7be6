"""Log-probabilities of given logits at their targets: one pass over the logits, and one more for their gradient.

    x [N, V]  float16, bfloat16 or float32    logits
    y [N]     int32 or int64                  targets; -100 where nothing is scored
    z [N, V]  float32, never stored           scale * x, or cap * tanh(scale * x)

Per row, in float32, with t = z_y and m the largest z but the target's:

    others = sum_{v != y} exp(z_v - m)             logp = log sigmoid(t - m - log others)
    total  = others + exp(t - m)                   p_v  = exp(z_v - m) / total,  1 - p_y = others / total

    mean_logits      = sum_v z_v / V               d logp / d z_v    = (v == y) - p_v
    entropy          = -sum_v p_v log p_v          d entropy / d z_v = -p_v (log p_v + entropy)
    log_sum_sq_probs = log sum_v p_v^2
    is_top1          = z_v < t for every v < y and z_v <= t for every v > y

The target stays out of the sums until the end, so that neither logp nor 1 - p_y cancels where p_y is near 1. Rows whose
target is -100 are not read: their results and gradients are zero. Other targets outside the vocabulary make logp NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORE_INDEX = tl.constexpr(-100)
LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(-1e4)  # exp(NEVER) is 0, and 0 * NEVER is not the NaN that 0 * -inf would be

LANES = 512  # of the forward's tile, with 16 bytes of logits a lane
BLOCK_V = 4096  # columns of the backward's
NUM_WARPS = 8


@triton.jit
def _transform(x, scale, cap):
    """z from x; 0 from 0."""
    z = x.to(tl.float32)
    if scale is not None:
        z *= tl.cast(scale, tl.float32)
    if cap is not None:
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(z * (2.0 * LOG2E)))  # saturates where exp2 overflows
        z = tl.cast(cap, tl.float32) * tanh
    return z


@triton.jit
def _log1p(w):
    """For 0 <= w <= 1, as 2 artanh(w / (2 + w)): the series keeps the digits of a small w, which log(1 + w) drops."""
    s = w / (2.0 + w)  # <= 1/3: seven terms are exact to float32
    q = s * s
    series = 1 / 11 + q * (1 / 13)
    series = 1 / 9 + q * series
    series = 1 / 7 + q * series
    series = 1 / 5 + q * series
    series = 1 / 3 + q * series
    return 2.0 * s * (1.0 + q * series)


@triton.jit
def _rebase(others, weighted, squares, old, new):
    """Sums of e, of e log e and of e^2 over e = exp(z - old), as sums over e = exp(z - new), new >= old."""
    step = tl.maximum(old - tl.where(new == -float("inf"), 0.0, new), NEVER)
    factor = tl.exp2(step * LOG2E)
    return others * factor, (weighted + others * step) * factor, squares * factor * factor


@triton.jit
def _token_logps_fwd_kernel(
    logits_ptr,  # [N, V], rows `stride` apart
    targets_ptr,  # [N]
    logps_ptr,  # [N] float32, as all results but is_top1
    shift_ptr,  # [N] m
    others_ptr,  # [N]
    total_ptr,  # [N]
    entropy_ptr,  # [N] or None, as those that follow: not asked for
    mean_logits_ptr,
    is_top1_ptr,  # bool
    log_sum_sq_probs_ptr,
    stride,
    V,
    scale,  # float or None
    cap,  # float or None
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program a row: LANES lanes, each of which folds VEC columns an iteration into a running maximum and sums.

    The columns of a lane lie in one thread, so that the loop has neither shuffles nor barriers, and move its maximum
    once together: that is one exponential a column, not two. After the loop the lanes are summed up, in a fixed order.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    y = tl.load(targets_ptr + row).to(tl.int32)
    scored = y != IGNORE_INDEX
    x = tl.load(logits_ptr + y, mask=(y >= 0) & (y < V), other=float("nan"))
    t = tl.where(scored, _transform(x, scale, cap), 0.0)

    lane, vec = tl.arange(0, LANES)[:, None], tl.arange(0, VEC)[None, :]
    # Loads are vectors along a lane or, of rows that are not aligned for those, scalars side by side across the lanes.
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
        # Most blocks hold neither the target nor the end of the row. With a load of their own they pay for no mask.
        if (end <= V) & ((y < start) | (y >= end)):
            z = _transform(tl.load(logits_ptr + off_v), scale, cap)  # [LANES, VEC]
            if mean_logits_ptr is not None:
                sum_z += tl.sum(z, 1)
        else:
            inside = off_v < V
            z = _transform(tl.load(logits_ptr + off_v, mask=inside, other=0.0), scale, cap)  # 0 where not inside
            if mean_logits_ptr is not None:
                sum_z += tl.sum(z, 1)
            if is_top1_ptr is not None and (start <= y) & (y < end):
                before = tl.maximum(m, tl.max(tl.where(off_v < y, z, -float("inf")), 1))
            z = tl.where(inside & (off_v != y), z, -float("inf"))

        old, m = m, tl.maximum(m, tl.max(z, 1))
        others, weighted, squares = _rebase(others, weighted, squares, old, m)
        d = z - tl.where(m == -float("inf"), 0.0, m)[:, None]  # [LANES, VEC]
        e = tl.exp2(d * LOG2E)
        others += tl.sum(e, 1)
        if entropy_ptr is not None:
            weighted += tl.sum(e * tl.maximum(d, NEVER), 1)
        if log_sum_sq_probs_ptr is not None:
            squares += tl.sum(e * e, 1)

    shift = tl.max(m, 0)
    others, weighted, squares = _rebase(others, weighted, squares, m, shift)
    others = tl.sum(others, 0)
    shift = tl.where(shift == -float("inf"), t, shift)  # nothing but the target is possible
    odds = t - shift - tl.log(others)
    logps = tl.minimum(odds, 0.0) - _log1p(tl.exp2(-tl.abs(odds) * LOG2E))
    tl.store(logps_ptr + row, tl.where(scored, logps, 0.0))
    tl.store(shift_ptr + row, shift)
    tl.store(others_ptr + row, others)
    tl.store(total_ptr + row, others + tl.exp2((t - shift) * LOG2E))

    if mean_logits_ptr is not None:
        tl.store(mean_logits_ptr + row, tl.sum(sum_z, 0) / V)
    if is_top1_ptr is not None:
        tl.store(is_top1_ptr + row, scored & (t >= shift) & (t > tl.max(before, 0)))
    if entropy_ptr is not None or log_sum_sq_probs_ptr is not None:
        # Over all words, the target too: relative to the larger of m and t.
        top = tl.maximum(shift, t)
        weighted, squares = tl.sum(weighted, 0), tl.sum(squares, 0)
        others, weighted, squares = _rebase(others, weighted, squares, shift, top)
        d = tl.maximum(t - top, NEVER)
        e = tl.exp2(d * LOG2E)
        log_total = tl.where(t > shift, -logps, tl.log(others + e))
        if entropy_ptr is not None:
            entropy = log_total - (weighted + e * d) / (others + e)
            tl.store(entropy_ptr + row, tl.where(scored, entropy, 0.0))
        if log_sum_sq_probs_ptr is not None:
            log_sum_sq_probs = tl.log(squares + e * e) - 2.0 * log_total
            tl.store(log_sum_sq_probs_ptr + row, tl.where(scored, log_sum_sq_probs, 0.0))


@triton.jit
def _token_logps_bwd_kernel(
    grad_ptr,  # [N, V] d loss / d x, contiguous, in the logits' dtype
    grad_logps_ptr,  # [N] float32 or None
    grad_entropy_ptr,  # [N] float32 or None
    logits_ptr,  # [N, V], rows `stride` apart
    targets_ptr,  # [N]
    shift_ptr,  # [N] float32, as the next two: what the forward returned
    others_ptr,
    total_ptr,
    stride,
    V,
    scale,  # float or None
    cap,  # float or None
    BLOCK_V: tl.constexpr,
):
    """One program a block of a row, so that few rows fill a device too; or, with a gradient of the entropy, one a row.

    That gradient needs the entropy of the whole row first.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    grad_ptr += row * V
    y = tl.load(targets_ptr + row).to(tl.int32)
    scored = y != IGNORE_INDEX
    read = tl.where(scored, V, 0)
    shift = tl.load(shift_ptr + row)
    others = tl.load(others_ptr + row)
    total = tl.load(total_ptr + row)

    gain = 1.0  # d z / d x where tanh is steepest
    if scale is not None:
        gain *= tl.cast(scale, tl.float32)
    if cap is not None:
        gain *= tl.cast(cap, tl.float32)
    if grad_logps_ptr is not None:
        of_logps = tl.load(grad_logps_ptr + row) * gain / total
    if grad_entropy_ptr is not None:
        of_entropy = tl.load(grad_entropy_ptr + row) * gain
        log_total = tl.log(total)  # inf where exp(t - m) overflows: then every p log p is 0, as it should be
        p_log_p = tl.zeros([BLOCK_V], tl.float32)
        for start in range(0, read, BLOCK_V):
            off_v = start + tl.arange(0, BLOCK_V)
            inside = off_v < V
            z = _transform(tl.load(logits_ptr + off_v, mask=inside, other=0.0), scale, cap)
            log_p = tl.maximum(z - shift - log_total, NEVER)
            p_log_p += tl.where(inside, tl.exp2(log_p * LOG2E) * log_p, 0.0)
        entropy = -tl.sum(p_log_p, 0)

    for start in range(tl.program_id(1) * BLOCK_V, V, tl.num_programs(1) * BLOCK_V):
        off_v = start + tl.arange(0, BLOCK_V)
        inside = off_v < V
        z = _transform(tl.load(logits_ptr + off_v, mask=off_v < read, other=0.0), scale, cap)  # [BLOCK_V]
        grad = tl.zeros([BLOCK_V], tl.float32)
        if grad_logps_ptr is not None:
            grad += of_logps * tl.where(off_v == y, others, -tl.exp2((z - shift) * LOG2E))
        if grad_entropy_ptr is not None:
            log_p = tl.maximum(z - shift - log_total, NEVER)
            grad -= of_entropy * tl.exp2(log_p * LOG2E) * (log_p + entropy)
        if cap is not None:
            tanh = z * (1.0 / tl.cast(cap, tl.float32))
            grad *= 1.0 - tanh * tanh
        tl.store(grad_ptr + off_v, tl.where(scored, grad, 0.0), mask=inside)


def token_logps_fwd(
    logits: Tensor,  # [N, V], the last stride 1
    targets: Tensor,  # [N]
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    statistics: str,
) -> list[Tensor]:
    """logps, shift, others, total, then the statistics; each [N]."""
    (n, vocabulary), stride = logits.shape, logits.stride(0)
    scale, cap = _scale_and_cap(softcap, logit_scale, temperature)
    results = {
        name: torch.empty(n, dtype=torch.bool if name == "is_top1" else torch.float32, device=logits.device)
        for name in ("logps", "shift", "others", "total", *filter(None, statistics.split(",")))
    }
    with torch.cuda.device_of(logits):
        _token_logps_fwd_kernel[(n,)](
            logits,
            targets.contiguous(),
            results["logps"],
            results["shift"],
            results["others"],
            results["total"],
            results.get("entropy"),
            results.get("mean_logits"),
            results.get("is_top1"),
            results.get("log_sum_sq_probs"),
            stride,
            vocabulary,
            scale,
            cap,
            LANES=LANES,
            VEC=16 // logits.itemsize,
            ALIGNED=all(x % 16 == 0 for x in (logits.data_ptr(), stride, vocabulary)),  # as Triton specialises
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return list(results.values())


def token_logps_bwd(
    grad_logps: Tensor | None,  # [N]
    grad_entropy: Tensor | None,  # [N]
    logits: Tensor,  # [N, V], the last stride 1
    targets: Tensor,  # [N]
    sums: Sequence[Tensor],  # logps, shift, others, total, each [N]
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> Tensor:
    """d loss / d logits, [N, V]."""
    n, vocabulary = logits.shape
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _, shift, others, total = sums
    programs = 1 if grad_entropy is not None else triton.cdiv(vocabulary, BLOCK_V)
    with torch.cuda.device_of(logits):
        _token_logps_bwd_kernel[(n, programs)](
            grad,
            None if grad_logps is None else grad_logps.contiguous(),
            None if grad_entropy is None else grad_entropy.contiguous(),
            logits,
            targets.contiguous(),
            shift,
            others,
            total,
            logits.stride(0),
            vocabulary,
            *_scale_and_cap(softcap, logit_scale, temperature),
            BLOCK_V=BLOCK_V,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return grad


def _scale_and_cap(softcap: float | None, logit_scale: float, temperature: float) -> tuple[float | None, float | None]:
    """`softcap * tanh(logit_scale * x / softcap) / temperature` in the kernels' terms; None if it changes nothing."""
    if softcap is not None:
        return logit_scale / softcap, softcap / temperature
    scale = logit_scale / temperature
    return None if scale == 1.0 else scale, None
