"""Runs the ops on CPU tensors with kernels compiled for an NVIDIA architecture, executed in NumPy."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastdpo.ops import devices
from fastdpo.ops.attention import triton_backend
from tools.ptx.driver import PTXDriver
from tools.ptx.driver import install as install_driver


def install(monkeypatch, name: str, edit: Callable[[str], str] | None = None) -> PTXDriver:
    """Kernels are chosen as on a device of that architecture. `edit` changes their PTX."""
    capability = int(name.removeprefix("sm")) // 10
    kernels_unsupported_reason = triton_backend.kernels_unsupported_reason

    def unsupported_reason(kind):
        return "float32" if kind.dtype == torch.float32 else kernels_unsupported_reason(kind)

    monkeypatch.setattr(triton_backend, "kernels_unsupported_reason", unsupported_reason)
    monkeypatch.setattr(devices, "TRITON_DEVICES", ("cpu",))
    monkeypatch.setattr(triton_backend, "compute_capability", lambda device: capability)
    return install_driver(monkeypatch, name, edit)
