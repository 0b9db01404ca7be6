"""The estimates in benchmarks/results/gpu_model.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastdpo.kernels.packed_attention import KernelConfig, KernelConfigs

from .bounds import Estimate
from .compiled import ATTENTION
from .devices import DEVICES, Device

RESULTS = Path(__file__).parents[1] / "results" / "gpu_model.json"


@dataclass(frozen=True)
class Row:
    """The estimate of one kernel.

    Attributes:
        device: its name.
        kernel: and what it computes.
        case: the head, or the head size.
        config: block sizes, warps and stages, if they can be chosen.
        used: whether it is the built-in choice.
        stack: bytes of a thread, for registers that it spills.
        floor, seconds, limit: as in `Estimate`.
    """

    device: str
    kernel: str
    case: str
    config: tuple[int, ...]
    used: bool
    stack: int
    floor: float
    seconds: float
    limit: str

    @property
    def kind(self) -> tuple[str, str, str]:
        return self.device, self.kernel, self.case

    @classmethod
    def of(cls, found: Estimate, stack: int, device: Device, kernel: str, case: str, config: Any, used: bool) -> Row:
        return cls(device.name, kernel, case, tuple(config), used, stack, found.floor, found.seconds, found.limit)


def write(rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Writes rows, those of a kind next to each other, the fastest first."""
    ordered = sorted(rows, key=lambda row: (row.kind, row.seconds, row.config))
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in ordered) + "\n]\n")


def read(path: Path = RESULTS) -> list[Row]:
    return [Row(**entry | {"config": tuple(entry["config"])}) for entry in json.loads(path.read_text())]


def kinds(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """The rows of each kind, in their order."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(row)
    return found


def ranked_attention(target: str, d: int) -> list[KernelConfigs]:
    """Configurations of the kernels of attention for an architecture and a head size, the fastest ones first.

    Empty if there are no estimates for them.
    """
    names = {device.name for device in DEVICES if device.target == target}
    found = [group for kind, group in kinds(read()).items() if kind[0] in names and kind[2] == f"D {d}"]
    by_kernel = {group[0].kernel: [KernelConfig(*row.config) for row in group] for group in found}
    if not by_kernel:
        return []
    return [KernelConfigs(*x) for x in zip(*(by_kernel[f"attention, {name}"] for name in ATTENTION), strict=False)]


def tables(rows: list[Row]) -> list[str]:
    """The tables of docs/gpu.md. Times in ms."""
    from tabulate import tabulate

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:#.3g}"

    def blocks(row: Row) -> str:
        return " x ".join(map(str, row.config[:-2])) + ", {} warps, {} stages".format(*row.config[-2:])

    def cells(row: Row) -> list[str]:
        return [ms(row.seconds), row.limit]

    def table(kernel: str, headers: list[str], cells: Callable[[list[Row]], list[str]]) -> str:
        lines = [[*kind, ms(x[0].floor), *cells(x)] for kind, x in kinds(rows).items() if kind[1].startswith(kernel)]
        return tabulate(lines, ["device", "kernel", "case", "floor", *headers], "github", disable_numparse=True)

    def of_attention(group: list[Row]) -> list[str]:
        used = next(row for row in group if row.used)
        return [*cells(used), blocks(used), ms(group[0].seconds), blocks(group[0])]

    def of_fused(group: list[Row]) -> list[str]:
        return [*cells(group[0]), blocks(group[0])]

    estimate = ["estimate", "limited by"]
    return [
        table("rows, forward of a head", estimate, lambda group: cells(group[0])),
        table("attention", [*estimate, "blocks", "lowest estimate", "its blocks"], of_attention),
        table("fused", [*estimate, "blocks"], of_fused),
    ]
