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
target is -100 are not read: their results and gradients are zero. Where the target is outside of the vocabulary, or its
logit +inf (logp would be 0, and an overflow hidden), logp is NaN, and so is the gradient, unless d loss / d logp is 0.

A head gives t apart, more precise than its logits, which the statistics are taken over with their own z_y; and it has
the gradient left unscaled, as a tile that it multiplies with its weight: exp(z_v - m), and -others at y, which times
-scale / total is d logp / d x (with a cap also times 1 - tanh^2).

After the forward's pass over a row m becomes m + log(others / LEVEL), relative to which the others sum up to LEVEL:
then the tile's entry at y has no rounding in 16 bits, and float16's range holds what matters of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORE_INDEX = tl.constexpr(-100)
LOG2E = tl.constexpr(1.4426950408889634)
LEVEL = tl.constexpr(1024.0)
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
def _target(y, V):
    """An id in [0, V) as int32, -1 for any other; and whether the target is scored."""
    return tl.where((y >= 0) & (y < V), y, -1).to(tl.int32), y != IGNORE_INDEX


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
def _log_sigmoid(odds):
    return tl.minimum(odds, 0.0) - _log1p(tl.exp2(-tl.abs(odds) * LOG2E))


@triton.jit
def _load(row_ptr, off_v, end, read, SPLIT: tl.constexpr):
    """The columns off_v < end of a row, 0 from `read` on. If split, a block that lies before pays for no mask."""
    if SPLIT:
        if end <= read:  # noqa: SIM108 - on values of the device Triton has no such expression
            x = tl.load(row_ptr + off_v)
        else:
            x = tl.load(row_ptr + off_v, mask=off_v < read, other=0.0)
    else:
        x = tl.load(row_ptr + off_v, mask=off_v < read, other=0.0)
    return x


@triton.jit
def _store(row_ptr, off_v, end, V, values, SPLIT: tl.constexpr):
    if SPLIT:
        if end <= V:
            tl.store(row_ptr + off_v, values)
        else:
            tl.store(row_ptr + off_v, values, mask=off_v < V)
    else:
        tl.store(row_ptr + off_v, values, mask=off_v < V)


@triton.jit
def _slope(z, cap):
    """d z / d (scale * x), from a capped z."""
    tanh = z * (1.0 / tl.cast(cap, tl.float32))
    return 1.0 - tanh * tanh


@triton.jit
def _gradient_tile(z, off_v, y, shift, others, cap):
    """exp(z - m), and -others at the target; times the slope of the cap."""
    tile = tl.where(off_v == y, -others, tl.exp2((z - shift) * LOG2E))
    if cap is not None:
        tile *= _slope(z, cap)
    return tile


@triton.jit
def _rebase(others, weighted, squares, old, new):
    """Sums of e, of e log e and of e^2 over e = exp(z - old), as sums over e = exp(z - new), new >= old."""
    step = tl.maximum(old - tl.where(new == -float("inf"), 0.0, new), NEVER)
    factor = tl.exp2(step * LOG2E)
    return others * factor, (weighted + others * step) * factor, squares * factor * factor


@triton.jit
def _over_all_words(others, weighted, squares, shift, own):
    """Entropy and log sum_v p_v^2 of a row, from its sums over all but the target, and the target's z."""
    top = tl.maximum(shift, own)
    confident = -_log_sigmoid(own - shift - tl.log(others))
    others, weighted, squares = _rebase(others, weighted, squares, shift, top)
    d = tl.maximum(own - top, NEVER, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(d * LOG2E)
    log_total = tl.where(own > shift, confident, tl.log(others + e))
    return log_total - (weighted + e * d) / (others + e), tl.log(squares + e * e) - 2.0 * log_total


@triton.jit
def _token_logps_fwd_kernel(
    logits_ptr,  # [N, V], rows `stride` apart
    targets_ptr,  # [N]
    target_logits_ptr,  # [N] float32 t, or None: that of the logits
    tile_ptr,  # [N, V] the gradient tile, rows `tile_stride` apart; may be the logits. Or None
    logps_ptr,  # [N] float32, as all results but is_top1
    shift_ptr,  # [N] m, the leveled one
    others_ptr,  # [N]
    total_ptr,  # [N]
    entropy_ptr,  # [N] or None, as those that follow: not asked for
    mean_logits_ptr,
    is_top1_ptr,  # bool
    log_sum_sq_probs_ptr,
    stride,
    tile_stride,
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
    The gradient tile takes a second loop, over a row that the caches hold.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    y, scored = _target(tl.load(targets_ptr + row), V)
    x = tl.load(logits_ptr + y, mask=y >= 0, other=float("nan"))
    own = tl.where(scored, _transform(x, scale, cap), 0.0)
    t = own
    if target_logits_ptr is not None:
        t = tl.where(scored, tl.load(target_logits_ptr + row), 0.0)
    t = tl.where(t == float("inf"), float("nan"), t)

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
    logps = _log_sigmoid(t - shift - tl.log(others))
    tl.store(logps_ptr + row, tl.where(scored, logps, 0.0))
    if mean_logits_ptr is not None:
        tl.store(mean_logits_ptr + row, tl.sum(sum_z, 0) / V)
    if is_top1_ptr is not None:
        tl.store(is_top1_ptr + row, scored & (own >= shift) & (own > tl.max(before, 0)))
    if entropy_ptr is not None or log_sum_sq_probs_ptr is not None:
        weighted, squares = tl.sum(weighted, 0), tl.sum(squares, 0)
        entropy, log_sum_sq_probs = _over_all_words(others, weighted, squares, shift, own)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, tl.where(scored, entropy, 0.0))
        if log_sum_sq_probs_ptr is not None:
            tl.store(log_sum_sq_probs_ptr + row, tl.where(scored, log_sum_sq_probs, 0.0))

    level = shift + tl.where(others > 0, tl.log(others / LEVEL), 0.0)
    others *= tl.exp2((shift - level) * LOG2E)
    tl.store(shift_ptr + row, level)
    tl.store(others_ptr + row, others)
    tl.store(total_ptr + row, others + tl.exp2((t - level) * LOG2E))
    if tile_ptr is not None:
        tile_ptr += row * tile_stride
        for start in range(0, V, LANES * VEC):
            off_v, end = start + off_tile, start + LANES * VEC
            z = _transform(_load(logits_ptr, off_v, end, tl.where(scored, V, 0), True), scale, cap)
            tile = _gradient_tile(z, off_v, y, level, others, cap)
            _store(tile_ptr, off_v, end, V, tl.where(scored, tile, 0.0), True)


@triton.jit
def _token_logps_bwd_kernel(
    grad_ptr,  # [N, V] d loss / d x, or the gradient tile, rows `grad_stride` apart; may be the logits
    grad_logps_ptr,  # [N] float32 or None
    grad_entropy_ptr,  # [N] float32 or None; without either, the gradient tile
    logits_ptr,  # [N, V], rows `stride` apart
    targets_ptr,  # [N]
    shift_ptr,  # [N] float32, as the next two: what the forward returned
    others_ptr,
    total_ptr,
    stride,
    grad_stride,
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
    grad_ptr += row * grad_stride
    y, scored = _target(tl.load(targets_ptr + row), V)
    read = tl.where(scored, V, 0)
    shift = tl.load(shift_ptr + row)
    others = tl.load(others_ptr + row)

    gain = 1.0  # d z / d x where tanh is steepest
    if scale is not None:
        gain *= tl.cast(scale, tl.float32)
    if cap is not None:
        gain *= tl.cast(cap, tl.float32)
    of_tile = 1.0
    if grad_logps_ptr is not None:
        of_logps = tl.load(grad_logps_ptr + row)
        of_tile = tl.where(of_logps == 0, 0.0, -of_logps * gain / tl.load(total_ptr + row))
    if grad_entropy_ptr is not None:
        of_entropy = tl.load(grad_entropy_ptr + row) * gain
        x = tl.load(logits_ptr + y, mask=y >= 0, other=tl.where(of_entropy == 0, 0.0, float("nan")))
        own = tl.where(scored, _transform(x, scale, cap), 0.0)
        top = tl.maximum(shift, own)
        # Of e = exp(z - top), over all words: the others' sum is known.
        total = others * tl.exp2((shift - top) * LOG2E) + tl.exp2((own - top) * LOG2E)
        weighted = tl.zeros([BLOCK_V], tl.float32)  # sum of e (z - top)
        for start in range(0, read, BLOCK_V):
            off_v = start + tl.arange(0, BLOCK_V)
            z = _transform(tl.load(logits_ptr + off_v, mask=off_v < V, other=0.0), scale, cap)
            d = tl.where(off_v < V, tl.maximum(z - top, NEVER), NEVER)
            weighted += tl.exp2(d * LOG2E) * d
        mean_d = tl.sum(weighted, 0) / total
        log_total = tl.log(total)

    SPLIT: tl.constexpr = grad_entropy_ptr is None  # with the entropy, branches would take registers that programs need
    for start in range(tl.program_id(1) * BLOCK_V, V, tl.num_programs(1) * BLOCK_V):
        off_v, end = start + tl.arange(0, BLOCK_V), start + BLOCK_V
        z = _transform(_load(logits_ptr, off_v, end, read, SPLIT), scale, cap)  # [BLOCK_V]
        grad = tl.zeros([BLOCK_V], tl.float32)
        if grad_logps_ptr is not None or grad_entropy_ptr is None:
            grad += of_tile * _gradient_tile(z, off_v, y, shift, others, cap)
        if grad_entropy_ptr is not None:
            d = tl.maximum(z - top, NEVER)
            of_z = of_entropy * tl.exp2((d - log_total) * LOG2E) * (d - mean_d)  # log p + entropy is d less its mean
            if cap is not None:
                of_z *= _slope(z, cap)
            grad -= of_z
        _store(grad_ptr, off_v, end, V, tl.where(scored, grad, 0.0), SPLIT)


def token_logps_fwd(
    logits: Tensor,  # [N, V], the last stride 1
    targets: Tensor,  # [N]
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    statistics: str,
    target_logits: Tensor | None = None,  # [N] float32
    tile: Tensor | None = None,  # [N, V], the last stride 1: filled; may be the logits
) -> list[Tensor]:
    """logps, shift, others, total, then the statistics; each [N]."""
    n, vocabulary = logits.shape
    scale, cap = scale_and_cap(softcap, logit_scale, temperature)
    results = results_by_name(n, statistics, logits.device)
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
            None if tile is None else tile.stride(0),
            vocabulary,
            scale,
            cap,
            LANES=LANES,
            VEC=16 // logits.itemsize,
            ALIGNED=_takes_vectors(logits) and (tile is None or _takes_vectors(tile)),
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return list(results.values())


def token_logps_bwd(
    grad: Tensor,  # [N, V], the last stride 1: filled; may be the logits
    grad_logps: Tensor | None,  # [N] float32
    grad_entropy: Tensor | None,  # [N] float32
    logits: Tensor,  # [N, V], the last stride 1
    targets: Tensor,  # [N]
    sums: Sequence[Tensor],  # logps, shift, others, total, each [N]
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> None:
    """Writes d loss / d logits."""
    if grad_logps is None and grad_entropy is None:
        grad.zero_()
    else:
        _launch_bwd(grad, grad_logps, grad_entropy, logits, targets, sums, softcap, logit_scale, temperature)


def token_logps_tile(
    tile: Tensor,  # [N, V], the last stride 1: filled; may be the logits
    logits: Tensor,  # [N, V], the last stride 1
    targets: Tensor,  # [N]
    sums: Sequence[Tensor],  # logps, shift, others, total, each [N]
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> None:
    """The gradient tile, again."""
    _launch_bwd(tile, None, None, logits, targets, sums, softcap, logit_scale, temperature)


def _launch_bwd(
    grad: Tensor,
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    targets: Tensor,
    sums: Sequence[Tensor],
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> None:
    n, vocabulary = logits.shape
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
            grad.stride(0),
            vocabulary,
            *scale_and_cap(softcap, logit_scale, temperature),
            BLOCK_V=BLOCK_V,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )


def results_by_name(n: int, statistics: str, device: torch.device) -> dict[str, Tensor]:
    """Memory for what a forward returns, in its order. [n] each"""
    return {
        name: torch.empty(n, dtype=torch.bool if name == "is_top1" else torch.float32, device=device)
        for name in ("logps", "shift", "others", "total", *filter(None, statistics.split(",")))
    }


def _takes_vectors(rows: Tensor) -> bool:
    """Whether 16 bytes can be loaded at once, as far as Triton's specialisation of arguments tells the compiler."""
    return rows.data_ptr() % 16 == 0 and rows.stride(0) % 16 == 0


def scale_and_cap(softcap: float | None, logit_scale: float, temperature: float) -> tuple[float | None, float | None]:
    """`softcap * tanh(logit_scale * x / softcap) / temperature` in the kernels' terms; None if it changes nothing."""
    if softcap is not None:
        return logit_scale / softcap, softcap / temperature
    scale = logit_scale / temperature
    return None if scale == 1.0 else scale, None
