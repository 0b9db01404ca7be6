"""The default number of bytes of gradient tiles that a trainable head keeps for its backward."""

from __future__ import annotations

from torch import Tensor

from ..devices import memory_of

MEMORY_BUDGET = 512 << 20
"""The least default, and the default on devices other than GPUs."""
GPU_SHARE = 16
"""On a GPU, the default is this part of its memory."""


def default_budget(weight: Tensor) -> int:
    """The default for a head with this weight [V, D]."""
    return budget_for(weight.numel() if weight.requires_grad else 0, memory_of(weight.device))


def budget_for(trained: int, device_memory: int | None) -> int:
    """The default for a head with this many trained elements of its weight.

    Tiles that are not kept are computed again one by one, and each of these products reads and
    writes the weight's gradient in float32. A budget below the size of that gradient would save
    little of the memory that the backward needs anyway, so twice its size is kept at least.

    Args:
        trained: elements of the weight, 0 if it needs no gradient.
        device_memory: bytes of the GPU, or None for another device.
    """
    if device_memory is None:
        return MEMORY_BUDGET
    gradient = 4 * trained  # float32
    return max(MEMORY_BUDGET, device_memory // GPU_SHARE, 2 * gradient)
