"""Short convolutions on packed tokens.

A convolution of width K sees K - 1 earlier tokens. Each segment is put behind the K - 1 tokens that
precede it in its row, its halo. One call convolves all of them, and the results of halos are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .segments import Segments, gather


class Convolution:
    """`causal_conv1d_fn(x, weight, ...)` with x [B, D, T] and weight [D, K]."""

    time = 2
    kernel_arguments = frozenset({"weight"})

    def run(self, original: Callable, segments: Segments, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The function's result for the packed tokens x [1, D, T]."""
        weight = args[0] if args else kwargs["weight"]
        index, keep = segments.halos(weight.shape[-1] - 1)
        return original(gather(x, self.time, index), *args, **kwargs).index_select(self.time, keep)

    def example(self, tokens: int, random: Callable[..., Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (random(1, 8, tokens), random(8, 4)), {}
