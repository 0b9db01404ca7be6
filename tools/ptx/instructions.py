"""The table of instructions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .program import Instruction

WARP = 32  # threads
Mask = np.ndarray | None  # which threads [lanes] execute an instruction, None for all
Execute = Callable[[Any, Mask], None]  # of `machine.Threads`, which imports this file
Compile = Callable[[Instruction], Execute]

_TABLE: dict[tuple[str, ...], tuple[str, Compile]] = {}


def instruction(*names: str, modifiers: str = "") -> Callable[[Compile], Compile]:
    """Registers the function that compiles the instructions whose names begin so.

    `modifiers` is a regular expression of the other parts of their names, types aside.
    """

    def register(compile_: Compile) -> Compile:
        _TABLE.update({tuple(name.split(".")): (modifiers, compile_) for name in names})
        return compile_

    return register


def compile_instruction(instruction: Instruction) -> Execute:
    """The function that executes an instruction.

    Raises:
        NotImplementedError: the instruction, or one of its modifiers, is unknown.
    """
    parts = (instruction.opcode, *instruction.modifiers)
    for count in range(len(parts), 0, -1):
        if parts[:count] in _TABLE:
            modifiers, compile_ = _TABLE[parts[:count]]
            if all(re.fullmatch(modifiers, x) for x in parts[count:]):
                return compile_(instruction)
            break
    raise NotImplementedError(f"unknown instruction: {instruction.text}")


@instruction("bra", modifiers="uni")
@instruction("ret", "exit", "fence", "wgmma.fence", modifiers=".*")
def _nothing(_: Instruction) -> Execute:
    """Branches are the machine's own. Fences order what is in order here."""
    return lambda threads, mask: None


@instruction("bar.sync")
def _barrier(ins: Instruction) -> Execute:
    """All threads run in lockstep: those that reach a barrier have reached it together."""
    if len(ins.operands) != 1:
        raise type_error(ins)

    def wait(threads, mask):
        threads.shared.pass_barrier(threads.whole(mask, threads.size))

    return wait


@instruction("bar.warp.sync")
def _warp_barrier(_: Instruction) -> Execute:
    def wait(threads, mask):
        threads.whole(mask, WARP)

    return wait


def type_error(instruction: Instruction) -> NotImplementedError:
    return NotImplementedError(f"unknown types or operands: {instruction.text}")
