"""Properties of devices that decide which kernels run."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch

TRITON_DEVICES = ("cuda",) if find_spec("triton") else ()  # AMD's devices have the type "cuda" too


def is_host(device: torch.device) -> bool:
    """Whether values on this device can be read without a synchronization."""
    return device.type == "cpu"


def suits_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether fastdpo's Triton kernels take tensors of this dtype on this device.

    They sum in float32.
    """
    return device.type in TRITON_DEVICES and dtype != torch.float64


@lru_cache
def compute_capability(device: torch.device) -> int | None:
    """The major compute capability of an NVIDIA device, None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)[0]
