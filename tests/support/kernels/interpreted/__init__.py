"""What tests change in Triton's interpreter, so that it finds what a GPU would do otherwise."""

from __future__ import annotations

from fastdpo.ops import devices
from tests.support.kernels.interpreted import accesses, bfloat16, calls, overflow, shapes


def install(monkeypatch) -> None:
    """Runs kernels on CPU tensors in the interpreter: bfloat16 is as on a GPU, accesses and overflow are checked."""
    monkeypatch.setattr(devices, "TRITON_DEVICES", ("cpu",))
    for change in (bfloat16, accesses, calls, overflow, shapes):
        change.install(monkeypatch)
