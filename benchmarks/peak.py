"""Peak memory of single steps above the memory that the process held after loading, in bytes."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from fastdpo.commands.check.meters import PeakMemory

PROCESS = Path("/proc/self")
RESET_PEAK = "5"


class PeakAboveBaseline:
    """Takes the baseline when it is created.

    On Linux the kernel records the peak of the resident set, which is reset before each step. Where
    it cannot be reset, and on an accelerator, `PeakMemory` measures instead.

    Attributes:
        bytes: peak inside the last `with peak.watched():`, minus the baseline.
        baseline: memory in use when this object was created, in bytes.
        kind: what is measured.
    """

    def __init__(self) -> None:
        gc.collect()
        self.kernel = not torch.cuda.is_available() and _reset_peak()
        self.kind = "resident set, by the kernel" if self.kernel else PeakMemory().kind
        self.baseline = _memory_in_use()
        self.bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        if self.kernel:
            gc.collect()
            _return_free_memory()
            _reset_peak()
            yield
            self.bytes = _peak_of_resident_set() - self.baseline
        else:
            gc.collect()
            meter, before = PeakMemory(), _memory_in_use()
            with meter.watched():
                yield
            self.bytes = meter.bytes + before - self.baseline + _memory_of_graphs()


def _return_free_memory() -> None:
    """Gives the free memory between small blocks back to the system, if the C library can: that of earlier steps, and
    of what the first one examined, is none of this step.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _memory_in_use() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def _memory_of_graphs() -> int:
    """Of the pools in which CUDA graphs compute. The allocator takes it for free when they are replayed."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    pools = [x for x in segments if tuple(x["segment_pool_id"]) != (0, 0)]
    return sum(x["total_size"] - x["allocated_size"] for x in pools)


def _reset_peak() -> bool:
    try:
        (PROCESS / "clear_refs").write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _peak_of_resident_set() -> int:
    return int(re.findall(r"VmHWM:\s+(\d+) kB", (PROCESS / "status").read_text())[0]) << 10
