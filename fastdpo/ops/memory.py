"""The memory of a device: what is free, who spends what packing leaves of it, and who gives back first.

The memory that padding would have taken, and what else is free, is spent on larger micro-batches, on gradient tiles of
the head that need not be computed again, on recorded graphs, and on activations that need not be computed again, in
this order (`SPENDERS`). If memory runs out in a forward, the last one of these gives back first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import sqrt
from pathlib import Path
from typing import NamedTuple, cast

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
        peak: the most that this process has used so far.
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


Size = tuple[int, int]
"""The tokens of a batch, and those of them that are scored, at least one."""


class Demand:
    """The bytes that calls take at most, by the sizes of their batches, from those of measured calls.

    For r times the tokens they are at most r^2 times as many, since attention that stores its scores grows with the
    square, and for r times the scored tokens, which the head takes memory for, r times as many.

    Attributes:
        known: sizes and bytes from which others follow.
    """

    def __init__(self, known: Iterable[tuple[Iterable[int], float]] = ()) -> None:
        self.known = {cast(Size, tuple(size)): most for size, most in known}

    def of(self, size: Size) -> float:
        """Infinite if nothing is known."""
        return min((most * _growth(known, size) for known, most in self.known.items()), default=torch.inf)

    def within(self, most: float) -> int:
        """The tokens that take at most so many bytes, where as large a part of them is scored as of known ones."""
        fitting = (x[0] * sqrt(most / known) for x, known in self.known.items() if known <= most)
        return int(max(fitting, default=0))

    def note(self, size: Size, most: float, least: float = 0.0) -> None:
        """Takes note of a call that has taken at most, and at least, so many bytes."""
        self.known = {x: max(bound, least / _growth(x, size)) for x, bound in self.known.items()}
        if most < self.of(size):
            others = {x: bound for x, bound in self.known.items() if bound < most * _growth(size, x)}
            self.known = others | {size: max(most, 1.0)}


def _growth(known: Size, size: Size) -> float:
    """How many times the bytes of a known size another one takes at most."""
    return max(1.0, (size[0] / known[0]) ** 2, size[1] / known[1])


held: dict[tuple[torch.device, str], tuple[int, str]] = {}
"""The most that each spender has held on a device, and a description of it."""

spared: dict[torch.device, tuple[int, float]] = {}
"""The latest peak of a device that kept activations have raised, and how many of its bytes all calls can do without."""


def is_on(device: torch.device) -> bool:
    """Whether memory of a device is spent on activations."""
    return device.type in ("cpu", "cuda") and is_set(VARIABLE, default="1" if device.type == "cuda" else "0")


def report(device: torch.device) -> MemoryReport | None:
    """What a device reports, or None if it does not report a peak."""
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
    paths = GROUPS[0].read_text().splitlines() if GROUPS[0].exists() else ()
    for kinds, path in (x.split(":", 2)[1:] for x in paths):
        group = GROUPS[1] / kinds / path.lstrip("/")  # the second version of groups names no kinds
        for folder in (group, *group.parents) if "memory" in kinds.split(",") or not kinds else ():
            for files in LIMITS:
                with suppress(OSError):
                    most, used = ((folder / x).read_text() for x in files)
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
    if is_on(device) and size > most_held(device, spender):
        held[device, spender] = int(size), text


def most_held(device: torch.device, spender: str) -> int:
    """The most bytes that one of `SPENDERS` has held."""
    return held.get((device, spender), (0, ""))[0]


def lines() -> list[str]:
    """What each spender has held at most, a line for each that has held anything."""
    shown = sorted(held.items(), key=lambda x: (str(x[0][0]), [*SPENDERS].index(x[0][1])))
    return [f"fastdpo: {device}, {spender}: {size >> 20:,} MiB, {text}" for (device, spender), (size, text) in shown]
