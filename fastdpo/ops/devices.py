"""Where Triton's kernels run."""

from __future__ import annotations

from importlib.util import find_spec

import torch

TRITON_DEVICES = ("cuda",) if find_spec("triton") else ()  # AMD's devices go by that name too


def is_host(device: torch.device) -> bool:
    """Whether a value can be read there without waiting for a device."""
    return device.type == "cpu"


def suits_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels take tensors there: their sums are float32."""
    return device.type in TRITON_DEVICES and dtype != torch.float64
