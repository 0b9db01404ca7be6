"""The machine code of a kernel for NVIDIA devices (SASS): its loops, and what each of them asks of a multiprocessor.

A kernel branches around work that few blocks need, such as masks. So one turn of a loop is counted
along the shortest way through it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import networkx

FMA = {"FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2"}
CONVERSIONS = {"I2F", "F2I", "F2F", "FRND", "POPC", "FLO", "BREV", "F2IP"}  # by the units of MUFU
CONTROL = {
    *("NOP", "BRA", "EXIT", "RET", "BSSY", "BSYNC", "WARPSYNC", "YIELD", "DEPBAR", "LDGDEPBAR", "WARPGROUP", "SYNCS"),
    *("FENCE", "MEMBAR", "ELECT", "ERRBAR", "CCTL", "CS2R", "S2R", "S2UR", "LDC", "LDCU", "ULDC", "R2UR", "BAR"),
    *("UTMALDG", "UTMASTG", "UTMACMDFLUSH", "ARRIVES", "NANOSLEEP"),
}
GLOBAL = {"LDG": "read", "LD": "read", "LDGSTS": "read", "STG": "write", "ST": "write"}
SHARED = {"LDS", "STS", "LDL", "STL"}
MATRICES = {"LDSM", "STSM"}
MMA = {"16816": 4096, "1688": 2048}  # floating-point operations of a warp


class Instruction(NamedTuple):
    """One instruction of a warp.

    Attributes:
        name: without modifiers: "LDG".
        modifiers: ("E", "128").
        operands: as printed.
        conditional: whether a predicate guards it.
    """

    name: str
    modifiers: tuple[str, ...]
    operands: str
    conditional: bool


@dataclass(frozen=True, eq=False)
class Program:
    """Basic blocks of instructions by number, and the graph of their order."""

    blocks: list[list[Instruction]]
    order: networkx.DiGraph

    @classmethod
    def parse(cls, listing: str) -> Program:
        """Reads the output of `nvdisasm -c`."""
        blocks: list[list[Instruction]] = [[]]
        labels: dict[str, int] = {}
        for line in listing.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                if blocks[-1]:
                    blocks.append([])
                labels[label[1]] = len(blocks) - 1
            elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
                guard, full_name, operands = found.groups()
                name, *modifiers = full_name.split(".")
                blocks[-1].append(Instruction(name, tuple(modifiers), operands, guard is not None))
                if name in ("BRA", "EXIT", "RET"):
                    blocks.append([])
        order = networkx.DiGraph()
        order.add_nodes_from(range(len(blocks)))
        for number, block in enumerate(blocks):
            last = block[-1] if block else Instruction("", (), "", False)
            if last.name == "BRA":
                (target,) = re.findall(r"\.L_x_\d+", last.operands)
                order.add_edge(number, labels[target])
            if (last.name not in ("BRA", "EXIT", "RET") or last.conditional) and number + 1 < len(blocks):
                order.add_edge(number, number + 1)
        reachable = {0, *networkx.descendants(order, 0)}
        return cls(blocks, order.subgraph(reachable))

    @cached_property
    def loops(self) -> dict[int, set[int]]:
        """The blocks of each natural loop, by its header."""
        dominators = networkx.immediate_dominators(self.order, 0)
        found: dict[int, set[int]] = {}
        for latch, header in self.order.edges:
            if header in _dominators_of(latch, dominators):
                body = found.setdefault(header, {header})
                rest = self.order.subgraph(set(self.order) - {header})
                body |= {latch, *networkx.ancestors(rest, latch)} if latch in rest else set()
        return found

    def turn(self, header: int) -> Counter[str]:
        """What a warp does in the shortest turn of a loop."""
        body = self.order.subgraph(self.loops[header])
        latches = [block for block in body if header in body[block]]

        def length(_: int, block: int, __: object) -> int:
            return len(self.blocks[block])

        ways = [networkx.shortest_path(body, header, latch, weight=length) for latch in latches]
        shortest = min(ways, key=lambda way: sum(len(self.blocks[block]) for block in way))
        return work(instruction for block in shortest for instruction in self.blocks[block])

    def outside(self, headers: Iterable[int]) -> Counter[str]:
        """What a warp does outside of some loops, each block once."""
        inside = set().union(*(self.loops[header] for header in headers))
        return work(instruction for block in set(self.order) - inside for instruction in self.blocks[block])


def _dominators_of(block: int, dominators: dict[int, int]) -> Iterator[int]:
    """The block itself, and those that every way to it passes."""
    yield block
    while dominators.get(block, block) != block:  # some versions of networkx list the first block, others do not
        block = dominators[block]
        yield block


def work(instructions: Iterable[Instruction]) -> Counter[str]:
    """What instructions of one warp ask of the units of a multiprocessor.

    `issue` counts instructions; `fma`, `imad`, `alu` and `mufu` those of each arithmetic unit; `shared`
    bytes of shared memory and of the first-level cache; `read` and `write` those of global memory;
    `products` floating-point operations of matrix products, and `mma` those of them by `mma.sync`.
    """
    found: Counter[str] = Counter()
    for name, modifiers, operands, _ in instructions:
        found["issue"] += 1
        width = next((int(x) // 8 for x in modifiers if x in ("64", "128")), 4)
        if name == "HGMMA":
            m, n, k = (int(x) for x in next(x for x in modifiers if "x" in x).split("x"))
            found["products"] += 2 * m * n * k // 4  # the share of one of four warps
            first_operand_is_shared = operands.split(",")[1].strip().startswith("gdesc")
            found["shared"] += (n * k + m * k * first_operand_is_shared) * 2 // 4
        elif name == "HMMA":
            operations = next(MMA[x] for x in modifiers if x in MMA)
            found["products"] += operations
            found["mma"] += operations
        elif name == "MUFU" or name in CONVERSIONS:
            found["mufu"] += 1
        elif name in FMA:
            found["fma"] += 1
        elif name == "IMAD":
            found["imad"] += 2 if {"WIDE", "HI"} & {*modifiers} else 1
        elif name in GLOBAL:
            width = 1 if {"U8", "S8"} & {*modifiers} else 2 if {"U16", "S16"} & {*modifiers} else width
            found[GLOBAL[name]] += 32 * width
            found["shared"] += 32 * width
        elif name in SHARED:
            found["shared"] += 32 * width
        elif name in MATRICES:
            found["shared"] += 128 * next((int(x) for x in modifiers if x in ("2", "4")), 1)
        elif name == "SHFL":
            found["shared"] += 128
        elif name not in CONTROL and not name.startswith("U"):
            found["alu"] += 1
    return found
