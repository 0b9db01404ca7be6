"""The machine code of a kernel for NVIDIA devices (SASS): its loops, and what a turn of each does.

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

GLOBAL = {"LDG": "read", "LD": "read", "LDGSTS": "read", "STG": "write", "ST": "write"}
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # bytes of a thread, 4 without any of these
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


def _dominators_of(block: int, dominators: dict[int, int]) -> Iterator[int]:
    """The block itself, and those that every way to it passes."""
    yield block
    while dominators.get(block, block) != block:  # some versions of networkx list the first block, others do not
        block = dominators[block]
        yield block


def work(instructions: Iterable[Instruction]) -> Counter[str]:
    """What instructions of one warp do.

    `issue` counts instructions, `mufu` exponentials and other special functions, `stack` loads and
    stores of spilled registers, `read` and `write` bytes of global memory, `products` floating-point
    operations of matrix products.
    """
    found: Counter[str] = Counter()
    for name, modifiers, *_ in instructions:
        found["issue"] += 1
        if name == "HGMMA":
            m, n, k = (int(x) for x in next(x for x in modifiers if "x" in x).split("x"))
            found["products"] += 2 * m * n * k // 4  # the share of one of four warps
        elif name == "HMMA":
            found["products"] += next(MMA[x] for x in modifiers if x in MMA)
        elif name == "MUFU":
            found["mufu"] += 1
        elif name in ("LDL", "STL"):
            found["stack"] += 1
        elif name in GLOBAL:
            found[GLOBAL[name]] += 32 * next((WIDTHS[x] for x in modifiers if x in WIDTHS), 4)
    return found
