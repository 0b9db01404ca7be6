"""The target's own logit of each token, from hidden states and a head's weight, never rounded below float32.

    h [N, D], W [V, D]  float16, bfloat16 or float32
    b [V]               the same, or None
    y [N]               int32 or int64 targets
    t [N]               float32    t = z(h . W_y + b_y), z as in `token_logps`

Sums over many tokens of a preference loss err by the rounding of these logits above all. Where the target is outside of
the vocabulary t is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .token_logps import _transform, scale_and_cap

BLOCK_D = 1024
NUM_WARPS = 4


@triton.jit
def _target_logits_kernel(
    out_ptr,  # [N]
    hidden_ptr,  # [N, D]
    weight_ptr,  # [V, D]
    bias_ptr,  # [V] or None
    targets_ptr,  # [N]
    stride_n,  # of hidden
    stride_v,  # of weight, as the next
    stride_d,
    D,
    V,
    scale,  # float or None
    cap,  # float or None
    BLOCK_D: tl.constexpr,
):
    """One program a token."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(targets_ptr + row).to(tl.int64)
    known = (y >= 0) & (y < V)
    hidden_ptr += row * stride_n
    weight_ptr += y * stride_v
    products = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        off_d = start + tl.arange(0, BLOCK_D)
        inside = off_d < tl.where(known, D, 0)
        h = tl.load(hidden_ptr + off_d, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + off_d.to(tl.int64) * stride_d, mask=inside, other=0.0).to(tl.float32)
        products += h * w
    x = tl.sum(products, 0)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + y, mask=known, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.where(known, _transform(x, scale, cap), float("nan")))


def target_logits(
    hidden: Tensor,  # [N, D], the last stride 1
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V], contiguous
    targets: Tensor,  # [N], contiguous
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> Tensor:
    """[N] float32"""
    n, d = hidden.shape
    out = torch.empty(n, dtype=torch.float32, device=hidden.device)
    with torch.cuda.device_of(hidden):
        _target_logits_kernel[(n,)](
            out,
            hidden,
            weight,
            bias,
            targets,
            hidden.stride(0),
            *weight.stride(),
            d,
            len(weight),
            *scale_and_cap(softcap, logit_scale, temperature),
            BLOCK_D=BLOCK_D,
            num_warps=NUM_WARPS,
            enable_fp_fusion=True,
        )
    return out
