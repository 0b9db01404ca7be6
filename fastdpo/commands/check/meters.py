"""Meters of a training run: tokens through the backbone, time, and memory above the loaded models."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def now() -> float:
    """Current time in seconds, after synchronizing the accelerator if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def tell_tokens(backbone: nn.Module, note: Callable[[int], object]) -> RemovableHandle:
    """Tells a function in each call how many tokens enter a backbone, including padding."""

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        note(kwargs["inputs_embeds"][..., 0].numel() if ids is None else ids.numel())

    return backbone.register_forward_pre_hook(count, with_kwargs=True)


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """A function that also appends how long each call has taken."""

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        start = now()
        result = function(*args, **kwargs)
        seconds.append(now() - start)
        return result

    return measured


class PeakMemory:
    """Peak memory inside `with peak.watched():`, minus the memory in use before it, in bytes.

    On CUDA and ROCm this is the memory allocated by torch; elsewhere the resident set of the
    process, sampled every 10 ms.
    """

    def __init__(self) -> None:
        self.kind = "accelerator" if torch.cuda.is_available() else "resident set"
        self.bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        gc.collect()
        with self._allocator() if torch.cuda.is_available() else self._resident_set():
            yield

    @contextmanager
    def _allocator(self) -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        self.bytes = torch.cuda.max_memory_allocated() - before

    @contextmanager
    def _resident_set(self) -> Iterator[None]:
        process, done = psutil.Process(), threading.Event()
        before = process.memory_info().rss

        def sample() -> None:
            while not done.wait(0.01):
                self.bytes = max(self.bytes, process.memory_info().rss - before)

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        yield
        done.set()
        sampler.join()
