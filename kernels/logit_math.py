"""Functions of one row of logits that several kernels share.

    x   raw logit, float16, bfloat16 or float32
    z   float32 logit      scale * x, or cap * tanh(scale * x)
    y   target             int32 in [0, V), or -1 where the target is not in the vocabulary
    t   float32            the target's logit z_y
    m   float32            the shift: the largest z of the other entries
    e   float32            exp(z - m)

Exponentials are taken in base 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORE_INDEX = tl.constexpr(-100)
LOG2E = tl.constexpr(1.4426950408889634)
MIN_EXPONENT = tl.constexpr(-1e4)  # its exponential is 0, and 0 * MIN_EXPONENT is 0 where 0 * -inf would be NaN


@triton.jit
def transform(x, scale, cap):
    """z from x. 0 stays 0."""
    z = x.to(tl.float32)
    if scale is not None:
        z *= tl.cast(scale, tl.float32)
    if cap is not None:
        z = tl.cast(cap, tl.float32) * tanh(z)
    return z


@triton.jit
def tanh(x):
    """tanh(x) with a relative error of a few roundings, also where it is small.

    Below 0.625 by the polynomial of `tanhf` in the Cephes Mathematical Library (S. L. Moshier, 1987).
    """
    q = x * x
    series = 2.06390887954e-2 + q * -5.70498872745e-3
    series = -5.37397155531e-2 + q * series
    series = 1.33314422036e-1 + q * series
    series = -3.33332819422e-1 + q * series
    large = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))  # saturates where exp2 overflows
    return tl.where(tl.abs(x) < 0.625, x + x * (q * series), large)


@triton.jit
def slope(z, cap):
    """d z / d (scale * x), divided by cap, from a capped z."""
    capped = z * (1.0 / tl.cast(cap, tl.float32))
    return 1.0 - capped * capped


@triton.jit
def split_target(y, V):
    """An id in [0, V) as int32 or -1 for any other, and whether the target is scored (not -100)."""
    return tl.where((y >= 0) & (y < V), y, -1).to(tl.int32), y != IGNORE_INDEX


@triton.jit
def log1p(w):
    """log(1 + w) for 0 <= w <= 1, as 2 artanh(w / (2 + w)).

    The series keeps the digits of a small w.
    """
    s = w / (2.0 + w)  # <= 1/3: seven terms are exact to float32
    q = s * s
    series = 1 / 11 + q * (1 / 13)
    series = 1 / 9 + q * series
    series = 1 / 7 + q * series
    series = 1 / 5 + q * series
    series = 1 / 3 + q * series
    return 2.0 * s * (1.0 + q * series)


@triton.jit
def log_sigmoid(odds):
    return tl.minimum(odds, 0.0) - log1p(tl.exp2(-tl.abs(odds) * LOG2E))


@triton.jit
def exponentials(z, shift, cap):
    """exp(z - m), multiplied by the slope of the cap: the gradient tile of columns without the target."""
    e = tl.exp2((z - shift) * LOG2E)
    if cap is not None:
        e *= slope(z, cap)
    return e


@triton.jit
def gradient_tile(z, off_v, y, shift, others, cap):
    """exp(z - m), and -others at the target; multiplied by the slope of the cap."""
    tile = tl.where(off_v == y, -others, tl.exp2((z - shift) * LOG2E))
    if cap is not None:
        tile *= slope(z, cap)
    return tile


@triton.jit
def rebase(others, weighted, squares, old, new):
    """Converts sums over e = exp(z - old) to sums over e = exp(z - new), new >= old.

    The sums are those of e, of e log e and of e^2.
    """
    step = tl.maximum(old - tl.where(new == -float("inf"), 0.0, new), MIN_EXPONENT)
    factor = tl.exp2(step * LOG2E)
    return others * factor, (weighted + others * step) * factor, squares * factor * factor


@triton.jit
def statistics_with_target(others, weighted, squares, shift, t):
    """Entropy and log sum_v p_v^2 of a row.

    Computed from the sums over the other entries and the target's logit t.
    """
    top = tl.maximum(shift, t)
    confident = -log_sigmoid(t - shift - tl.log(others))
    others, weighted, squares = rebase(others, weighted, squares, shift, top)
    d = tl.maximum(t - top, MIN_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
    e = tl.exp2(d * LOG2E)
    log_total = tl.where(t > shift, confident, tl.log(others + e))
    return log_total - (weighted + e * d) / (others + e), tl.log(squares + e * e) - 2.0 * log_total


def scale_and_cap(softcap: float | None, logit_scale: float, temperature: float) -> tuple[float | None, float | None]:
    """Scale and cap of a transform, None where they change nothing.

    The transform is `softcap * tanh(logit_scale * x / softcap) / temperature`.
    """
    if softcap is not None:
        return logit_scale / softcap, softcap / temperature
    scale = logit_scale / temperature
    return None if scale == 1.0 else scale, None


def empty_results_by_name(n: int, statistics: str, device: torch.device) -> dict[str, Tensor]:
    """Uninitialized results of a forward, [n] each, in the order in which the op returns them."""
    return {
        name: torch.empty(n, dtype=torch.bool if name == "is_top1" else torch.float32, device=device)
        for name in ("logps", "shift", "others", "total", *filter(None, statistics.split(",")))
    }
