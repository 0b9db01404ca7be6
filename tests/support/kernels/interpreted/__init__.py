"""What tests change in Triton's interpreter, so that it finds what a GPU would do otherwise."""

from __future__ import annotations

import torch

from fastdpo.ops import devices
from tests.support.kernels.interpreted import accesses, bfloat16, calls, overflow, shapes


def install(monkeypatch) -> None:
    """Runs kernels on CPU tensors in the interpreter: bfloat16 is as on a GPU, accesses and overflow are checked.

    New memory holds NaN (or True), so that elements that no kernel writes are found.
    """
    monkeypatch.setattr(devices, "TRITON_DEVICES", ("cpu",))
    for change in (bfloat16, accesses, calls, overflow, shapes):
        change.install(monkeypatch)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(allocate):
    def allocate_and_fill(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

    return allocate_and_fill
