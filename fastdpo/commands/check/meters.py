"""Meters of a training run: tokens through the backbone, time, memory above the loaded models."""

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


def now() -> float:
    """Current time in seconds, after synchronizing the accelerator if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


class TokenCounter:
    """Counts the tokens that enter a backbone, including padding, by a forward pre-hook.

    Attributes:
        tokens: those of all calls since the last `take`.
        last: those of the last call.
        remove: removes the hook.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self.tokens = self.last = 0
        self.remove = backbone.register_forward_pre_hook(self._count, with_kwargs=True).remove

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        self.last = kwargs["inputs_embeds"][..., 0].numel() if ids is None else ids.numel()
        self.tokens += self.last

    def take(self) -> int:
        """Returns the number of tokens since the last call."""
        taken, self.tokens = self.tokens, 0
        return taken


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
