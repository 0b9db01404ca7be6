"""What the first step of a training waits for, by its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from fastdpo.commands.check.meters import now

COMPILING, SMALL_CASES, TUNING, PROBE = "compiling", "small cases", "timing candidates", "probe"
CACHES = "TRITON_CACHE_DIR", "FASTDPO_KERNEL_CACHE"
"""The variables of what later processes need not wait for."""


class Clock:
    """Adds up the seconds of functions while it is on, each without those of the others that it calls."""

    def __init__(self) -> None:
        self.is_on = True
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner = [0.0]  # of each call that is running, the seconds of those within it

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return function(*args, **kwargs)
            self.calls[part] += 1
            self._inner.append(0.0)
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = now() - start
                self.seconds[part] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return run

    def watch(self, part: str, module: Any, name: str) -> None:
        setattr(module, name, self.timed(part, getattr(module, name)))


def watched() -> Clock:
    """A clock of whatever a first step waits for."""
    from fastdpo.models.examine import probe
    from fastdpo.ops.attention import routes
    from fastdpo.ops.choice import tuning, verdicts

    clock = Clock()
    if torch.cuda.is_available():
        import triton

        clock.watch(COMPILING, triton.compiler, "compile")  # which reads what the cache has
    for part, module, name in (
        (SMALL_CASES, verdicts, "outcome"),
        (SMALL_CASES, routes, "outcome"),
        (TUNING, tuning, "_measured"),
        *((PROBE, probe, name) for name in ("probe", "head_difference")),
    ):
        clock.watch(part, module, name)
    return clock
