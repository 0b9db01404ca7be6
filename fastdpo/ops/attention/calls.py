"""The interface between `packed_attention` and the backends that compute a whole layout at once.

Dimensions: T packed tokens, H query heads, H_kv key heads, D head size of queries and keys, D_v head
size of values, S rows of the layout.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..devices import suits_triton

OP = "packed_attention"
MAX_HEAD_SIZE = 256


class AttentionOptions(NamedTuple):
    """The options of `packed_attention`, with a default scale filled in."""

    scale: float
    window: int | None
    softcap: float | None


class AttentionCall(Protocol):
    """Forward and backward of one attention call. Tensors have the shapes of `packed_attention`.

    Both run inside of custom ops, where autograd records nothing: the backward must be explicit.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out [T, H, D_v] and log-sum-exps of the scores [H, T], both with the sinks included."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        ...


class Backend(Protocol):
    """A way to compute a whole layout at once, listed in `backends.BACKENDS`."""

    @property
    def needs_probe(self) -> bool:
        """Whether the backend must match fastdpo's kernels on a small test case before its use."""
        ...

    def unsupported_reason(self, query: Tensor, value: Tensor, options: AttentionOptions) -> str | None:
        """Why the backend cannot compute this call, or None if it can."""
        ...

    def prepare(self, query: Tensor, value: Tensor, rows: Tensor, options: AttentionOptions) -> AttentionCall:
        """The call for supported inputs, once for a layout. `rows` [S, 4] as in `packed_attention`, without islands.

        Its tensors on the device are those that `layout_cache` finds: in tuples.
        """
        ...


def kernels_unsupported_reason(query: Tensor, value: Tensor) -> str | None:
    """Why fastdpo's Triton kernels do not take these tensors, or None if they do."""
    if not suits_triton(query.device, query.dtype):
        needed = "Triton, a device that Triton supports, and a dtype other than float64"
        return f"it needs {needed}; got {query.device}, {query.dtype}"
    size = max(query.shape[2], value.shape[2])
    if size > MAX_HEAD_SIZE:
        return f"it needs head sizes of at most {MAX_HEAD_SIZE}; got {size}"
    return None


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds sinks [H] to the softmax of an output, in place, and of its log-sum-exps.

    `out` is [T, H, D_v] and `lse` is [H, T].
    """
    logits = sinks.to(lse.dtype)[:, None]
    return out.mul_(torch.sigmoid(lse - logits).t()[..., None]), torch.logaddexp(lse, logits)


def flash_supports_scale(scale: float) -> bool:
    """Whether flash attention is correct with this scale.

    It masks with -inf and takes maxima before it scales, so the scale must be positive and normal.
    """
    return scale >= torch.finfo(torch.float32).tiny


def with_last_stride_1(x: Tensor) -> Tensor:
    """x, or a copy whose elements of one head are adjacent in memory, as all kernels require."""
    return x if x.stride()[-1] == 1 else x.contiguous()
