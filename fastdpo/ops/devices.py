"""Properties of devices and dtypes that decide which kernels run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

TRITON_DEVICES = ("cuda",) if find_spec("triton") else ()  # AMD's devices have the type "cuda" too


F = TypeVar("F", bound=Any)
T = TypeVar("T")


def constant_while_tracing(function: F) -> F:
    """Like `torch.compiler.assume_constant_result`, but without importing Dynamo and Triton."""
    function._dynamo_marked_constant = True
    return function


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


@constant_while_tracing
def architecture(device: torch.device) -> str:
    """The architecture of a GPU, such as "sm90" or "gfx942". The type of any other device."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


@constant_while_tracing
def memory_of(device: torch.device) -> int | None:
    """The bytes of a GPU's memory, None for other devices.

    All of it, not what is free: that is the same on every rank and in every call.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(device).total_memory


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of the device captures a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def in_new_thread(run: Callable[[], T], device: torch.device) -> T:
    """Runs a function in a thread of its own, on the current stream of a device.

    Autograd, autocast, modes and the default device are there those of a new process.
    """
    stream = torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else nullcontext()

    def run_on_stream() -> T:
        with stream:
            return run()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run_on_stream).result()


def current_stream(device: torch.device) -> tuple | None:
    """The current stream of a GPU, and whether it captures a CUDA graph; None for other devices."""
    return (torch.cuda.current_stream(device), is_capturing(device)) if device.type == "cuda" else None


def is_traced() -> bool:
    """Whether calls are recorded or transformed: by a compiler, a dispatch mode or functorch."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active()


@constant_while_tracing
def is_transformed() -> bool:
    """Whether functions are transformed by torch.func, or differentiated in forward mode. Their tensors may have no
    values that the host could read, and only what is made of operators of torch can be transformed.
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
