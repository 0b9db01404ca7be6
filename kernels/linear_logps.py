"""Logits of the targets from hidden states and a head's weight, never rounded below float32.

    h [N, D], W [V, D]  float16, bfloat16 or float32    hidden states and weight
    b [V]               the same, or None               bias
    y [N]               int32 or int64                  targets
    t [N]               float32                         t = z(h . W_y + b_y), with z as in `token_logps`

t is NaN where the target is not in the vocabulary. The rounding of these logits is the main source
of error in the sums over many tokens that a preference loss compares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logit_math import scale_and_cap, transform

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
    stride_v,  # of weight
    stride_d,  # of weight
    D,
    V,
    scale,  # float or None
    cap,  # float or None
    BLOCK_D: tl.constexpr,
):
    """One program per token."""
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
    tl.store(out_ptr + row, tl.where(known, transform(x, scale, cap), float("nan")))


def target_logits(
    hidden: Tensor,  # [N, D], last stride 1
    weight: Tensor,  # [V, D]
    bias: Tensor | None,  # [V], contiguous
    targets: Tensor,  # [N], contiguous
    softcap: float | None,
    logit_scale: float,
    temperature: float,
) -> Tensor:
    """Transformed logits [N] of the targets, float32."""
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
