"""The peak memory of single steps above what the process held when everything was loaded, in bytes."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from benchmarks.demo.meters import PeakMemory

PROCESS = Path("/proc/self")
RESET_PEAK = "5"


class PeakAboveLevel:
    """Made where the level is to be taken. `bytes` is the peak inside the last `with peak.watched():`, less the level.

    On Linux the kernel keeps the peak of the resident set, which each step resets. Where it may not be reset, and on an
    accelerator, the demo's meter measures.
    """

    def __init__(self) -> None:
        gc.collect()
        self.kernel = not torch.cuda.is_available() and _reset()
        self.kind = "resident set, by the kernel" if self.kernel else PeakMemory().kind
        self.level = _held()
        self.bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        if self.kernel:
            gc.collect()
            _reset()
            yield
            self.bytes = _highest() - self.level
        else:
            gc.collect()
            meter, before = PeakMemory(), _held()
            with meter.watched():
                yield
            self.bytes = meter.bytes + before - self.level


def _held() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def _reset() -> bool:
    try:
        (PROCESS / "clear_refs").write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _highest() -> int:
    return int(re.findall(r"VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text())[0]) << 10
