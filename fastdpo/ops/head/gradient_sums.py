"""Gradients of a head's inputs, as products with its gradient tiles.

Dimensions: N scored tokens, n tokens of one tile, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientSum:
    """The gradient of a parameter: `scale * sum(tile.T @ rows)` over tiles, in a wide dtype.

    Args:
        out: [V, ...] memory for the gradient.
        dtype: the dtype of the sum. A sum in another dtype than `out` is kept separately and
            rounded once.
        scale: a scalar tensor, or None for 1.
        accumulate: add the gradient to `out`, as to Megatron-LM's `main_grad`, instead of
            overwriting it.
    """

    def __init__(self, out: Tensor, dtype: torch.dtype, scale: Tensor | None, accumulate: bool = False) -> None:
        self.out, self.scale, self.accumulate = out, scale, accumulate
        self.separate = scale is not None or out.dtype != dtype
        self.total = torch.empty_like(out, dtype=dtype) if self.separate else out
        self.overwrite = self.separate or not accumulate  # the first product replaces what `total` holds

    def add(self, tile: Tensor, rows: Tensor) -> None:
        """Adds `tile.T @ rows` for a tile [n, V] and rows [n, ...]."""
        total, beta = self.total, 0 if self.overwrite else 1  # beta 0 also ignores uninitialized memory
        if tile.dtype != total.dtype and tile.device.type == "cuda":
            torch.addmm(total, tile.t(), rows.to(tile.dtype), beta=beta, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, tile.t().to(total.dtype), rows.to(total.dtype), beta=beta, out=total)
        self.overwrite = False

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds rows [n, ...], without the scale, to those of `index` [n], after all tiles.

        Rows of the same index are added in a fixed order.
        """
        self._apply_scale()
        if self.total.device.type == "cuda":  # sorts, where index_add_ uses atomics
            self.total.index_put_((index,), rows, accumulate=True)
        else:
            self.total.index_add_(0, index, rows)

    def _apply_scale(self) -> None:
        if self.scale is not None:
            self.total *= self.scale
            self.scale = None

    def finish(self) -> None:
        """Writes the gradient to `out`."""
        self._apply_scale()
        if self.separate and self.accumulate:
            self.out += self.total
        elif self.separate:
            self.out.copy_(self.total)


def wide_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Writes `a @ b` to `out`, whose dtype may be wider; on CUDA it is not rounded to theirs first."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a @ b)


def split_row_scale(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Splits row factors [N] into factors [N] that `dtype` can represent and a common factor.

    Upstream gradients may be too small for float16. There, rows are multiplied by their share of
    the largest factor, and the sum over all rows by that factor. For other dtypes the common factor
    is None.
    """
    if dtype != torch.float16:
        return scale, None
    largest = scale.abs().amax().clamp(min=torch.finfo(scale.dtype).tiny)
    return scale / largest, largest


def empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized gradients of the inputs that need one, and empty tensors for the others."""
    grads = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if needed and x is not None else hidden.new_empty(0)
        for x, needed in zip((hidden, weight, bias), needs, strict=True)
    ]
    return grads[0], grads[1], grads[2]
