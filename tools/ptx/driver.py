"""A driver and a backend of Triton whose GPU is the machine of this package.

Kernels are launched with CPU tensors. Triton compiles them for an NVIDIA architecture, up to PTX.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from .machine import Launch
from .memory import GlobalMemory
from .program import Program

SHARED_MEMORY = {  # bytes that a program can have
    **dict(sm80=163 << 10, sm86=99 << 10, sm89=99 << 10, sm90=227 << 10, sm120=99 << 10),
}


class PTXBackend(CUDABackend):
    """Triton's backend for NVIDIA, without the assembler."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "ptx"

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "ptx"

    def add_stages(self, stages: dict[str, Callable], *rest: Any) -> None:
        super().add_stages(stages, *rest)
        del stages["cubin"]

    def hash(self) -> str:  # of the compiled kernels in Triton's cache
        return f"executed-{super().hash()}"


class Launcher:
    """Launches a kernel in NumPy."""

    def __init__(self, source, metadata, launches: list[str]) -> None:
        self.kinds, self.metadata, self.launches = list(source.signature.values()), metadata, launches

    def __call__(
        self, x: int, y: int, z: int, stream, program: Program, _metadata, _launch, enter, leave, *args
    ) -> None:
        given = [(kind, value) for kind, value in zip(self.kinds, args, strict=True) if kind != "constexpr"]
        values = [_bytes(kind, value) for kind, value in given]
        values += [bytes(8)] * (len(program.parameters) - len(values))  # pointers to scratch memory, which is not used
        parameters = dict(zip(program.parameters, values, strict=True))
        memory = GlobalMemory(x for x in args if isinstance(x, torch.Tensor))
        self.launches.append(program.name)
        Launch(program, (x, y, z), parameters, memory, self.metadata.shared).run()


def _bytes(kind: str, value: Any) -> bytes:
    if kind.startswith("*"):
        return _i64(value.data_ptr())
    if kind == "fp32":
        return np.float32(value).tobytes()
    sizes = dict(i32=4, i64=8)
    if kind not in sizes:
        raise NotImplementedError(f"parameter of type {kind}")
    return int(value).to_bytes(sizes[kind], "little", signed=True)


def _i64(value: int) -> bytes:
    return int(value).to_bytes(8, "little", signed=value < 0)


class Utils:
    """What Triton asks of a driver when it loads a kernel."""

    def __init__(self, owner: PTXDriver) -> None:
        self.owner = owner

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self.owner.name], "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, ptx: bytes, shared: int, device: int) -> tuple[None, Program, int, int, int]:
        text = ptx.decode()
        return None, Program(self.owner.edit(text) if self.owner.edit else text), 0, 0, 1024


class PTXDriver:
    """Triton's driver for an architecture.

    Attributes:
        name: the architecture, a key of SHARED_MEMORY.
        edit: changes the PTX of each kernel before it is loaded.
        launches: the name of each kernel that was launched.
    """

    def __init__(self, name: str, edit: Callable[[str], str] | None = None) -> None:
        self.name, self.edit = name, edit
        self.launches: list[str] = []
        self.utils = Utils(self)

    def launcher_cls(self, source, metadata) -> Launcher:
        return Launcher(source, metadata, self.launches)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("ptx", int(self.name.removeprefix("sm")), 32)

    def get_current_device(self) -> Any:
        """Kernels are kept by device: those of an architecture, and those of each driver that edits them."""
        return self

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


_unedited = lru_cache(PTXDriver)  # keeps compiled kernels from one use to the next


def install(monkeypatch, name: str, edit: Callable[[str], str] | None = None) -> PTXDriver:
    """Makes kernels of CPU tensors run compiled for an architecture, "sm80" for example."""
    chosen = PTXDriver(name, edit) if edit else _unedited(name)
    chosen.launches.clear()
    monkeypatch.setitem(backends, "ptx", Backend(PTXBackend, PTXDriver))
    monkeypatch.setattr(driver, "_active", chosen)
    return chosen
