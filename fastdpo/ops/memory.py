"""The memory of a device: what is free, who spends what packing leaves of it, and who gives back first.

The memory that padding would have taken, and what else is free, is spent on larger micro-batches, on gradient tiles of
the head that need not be computed again, on recorded graphs, and on activations that need not be computed again, in
this order (`SPENDERS`). If memory runs out in a forward, the last one of these gives back first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from ..logs import is_set
from .devices import is_capturing, is_traced

VARIABLE = "FASTDPO_AUTO"
"""The environment variable by which, if it is "0", nothing is spent or decided by measuring. On a CPU, activations are
kept only if it is "1".
"""

SHARE = 4 / 5
"""The part of a device's memory that is used."""

CPU_SHARE = 1 / 2
"""On a CPU, where a process that takes too much is killed, the part of the available memory that is used."""

SPENDERS = {
    "micro-batches": 'max_tokens="auto" lets them grow',
    "gradient tiles": "of a trained head, kept up to its budget and what is left",
    "recordings": "CUDA graphs, made while the largest batch fits twice next to them",
    "activations": "of checkpointed layers, as many as fit next to the largest call",
}
"""Who spends memory, in the order of precedence, each with its rule."""

GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Files of control groups: the limit of a group and what it uses."""


class MemoryReport(NamedTuple):
    """The memory of a device, in bytes.

    Attributes:
        used: by this process, now.
        peak: the most that this process has used so far, without what kept activations have added to it.
        others: used by others than this process.
        total: of the device.
        most: that this process may use for another reason, such as a limit of its own.
    """

    used: int
    peak: int
    others: int
    total: int
    most: float = torch.inf

    @property
    def limit(self) -> float:
        """The bytes that this process may use."""
        return min(SHARE * self.total - self.others, self.most)


peaks: dict[torch.device, tuple[int, int]] = {}
"""The latest peak of each device, and the latest one without what kept activations have added."""

added_bytes: dict[torch.device, float] = {}
"""The bytes that activations which are kept now add to a peak."""

held: dict[tuple[torch.device, str], tuple[int, str]] = {}
"""The most that each spender has held on a device, and a description of it."""


def is_on(device: torch.device) -> bool:
    """Whether memory of a device is spent on activations."""
    return device.type in ("cpu", "cuda") and is_set(VARIABLE, default="1" if device.type == "cuda" else "0")


def report(device: torch.device) -> MemoryReport | None:
    """What a device reports, or None if it does not report a peak."""
    now = read(device)
    if now is None:
        return None
    seen, without = peaks.get(device, (0, 0))
    if now.peak != seen:
        added = int(now.peak - added_to_peaks(device))
        peaks[device] = now.peak, max(without, added) if now.peak > seen else added  # which other code has reset
    return now._replace(peak=peaks[device][1])


def add_to_peaks(device: torch.device, added: float) -> None:
    """Takes note of how much higher peaks are from now on by activations that are kept, which reports leave out."""
    report(device)
    added_bytes[device] = added


def added_to_peaks(device: torch.device) -> float:
    """The bytes that activations which are kept now add to a peak."""
    return added_bytes.get(device, 0.0)


def read(device: torch.device) -> MemoryReport | None:
    """As `report`, with the peak as it was."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats(device)
        used, peak = (stats.get(f"allocated_bytes.all.{x}", 0) for x in ("current", "peak"))
        others = total - free - stats.get("reserved_bytes.all.current", 0)
        return MemoryReport(used, peak, others, total, torch.cuda.get_per_process_memory_fraction(device) * total)
    if device.type == "cpu" and Path("/proc/meminfo").exists():
        import resource

        lines = (x.split() for x in Path("/proc/meminfo").read_text().splitlines())
        whole = {name: int(size) * 1024 for name, size, *_ in lines}
        used = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        peak = max(used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # the system updates it later
        total, available = whole["MemTotal:"], whole["MemAvailable:"]
        most = used + CPU_SHARE * min([available, *_left_in_groups()]) if is_on(device) else torch.inf
        return MemoryReport(used, peak, max(total - available - used, 0), total, most)
    return None


def _left_in_groups() -> Iterator[int]:
    """The bytes that each control group around this process still allows."""
    try:
        paths = [x.split(":", 2)[1:] for x in GROUPS[0].read_text().splitlines()]
    except OSError:
        return
    for kinds, path in paths:
        group = GROUPS[1] / kinds / path.lstrip("/")  # the second version of groups names no kinds
        for folder in (group, *group.parents) if "memory" in kinds.split(",") or not kinds else ():
            for files in LIMITS:
                try:
                    most, used = ((folder / x).read_text() for x in files)
                except OSError:
                    continue
                if most.strip() != "max":
                    yield max(int(most) - int(used), 0)


def left(device: torch.device) -> float:
    """The bytes that a GPU has left for this process; infinite for other devices, and where nothing may be read."""
    if device.type != "cuda" or is_traced() or is_capturing(device) or not is_on(device):
        return torch.inf
    now = report(device)
    return torch.inf if now is None else now.limit - now.used


def hold(device: torch.device, spender: str, size: float, text: str) -> None:
    """Takes note of what one of `SPENDERS` holds, for `lines`, where memory is spent."""
    if is_on(device) and size > held.get((device, spender), (0, ""))[0]:
        held[device, spender] = int(size), text


def lines() -> list[str]:
    """What each spender has held at most, a line for each that has held anything."""
    shown = sorted(held.items(), key=lambda x: (str(x[0][0]), [*SPENDERS].index(x[0][1])))
    return [f"fastdpo: {device}, {spender}: {size >> 20:,} MiB, {text}" for (device, spender), (size, text) in shown]
