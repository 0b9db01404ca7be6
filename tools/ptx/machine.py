"""Runs the threads of a batch of programs in lockstep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from . import arithmetic, products, transfers  # noqa: F401 (they fill the table of instructions)
from .asynchronous import PendingGroups
from .formats import DTYPES, U32, U64, unsigned
from .instructions import WARP, Execute, Mask, compile_instruction
from .memory import Fault, GlobalMemory, SharedMemory
from .program import Address, Immediate, Instruction, Negated, Operand, Program, Register, Symbol

BATCH = 64  # programs that run at the same time


class Launch(NamedTuple):
    """What all programs of a launch share.

    Attributes:
        program: the kernel.
        grid: the number of programs in each dimension.
        parameters: the bytes of each parameter, by its name.
        memory: the arguments.
        shared_size: bytes of shared memory of a program.
    """

    program: Program
    grid: tuple[int, int, int]
    parameters: Mapping[str, bytes]
    memory: GlobalMemory
    shared_size: int

    def run(self) -> None:
        code = [compile_instruction(x) for x in self.program.code]
        count = math.prod(self.grid)
        with np.errstate(all="ignore"):
            for first in range(0, count, BATCH):
                Threads(self, first, min(BATCH, count - first)).run(code)


class Threads:
    """The threads of some programs, their registers and what they wait for.

    A value of a register has the shape [lanes], or [] if it is equal in all threads.

    Attributes:
        lanes: the number of threads.
        programs: the number of each thread's program in the launch.
        places: the number of each thread's program in this batch.
        warps: the number of each thread's warp in its program.
        shared: the shared memory.
        copies: cp.async copies that are under way.
        products: wgmma products that are under way.
    """

    def __init__(self, launch: Launch, first: int, count: int) -> None:
        self.launch = launch
        self.size = launch.program.threads
        self.lanes = count * self.size
        thread = np.arange(self.lanes)
        self.places = thread // self.size
        self.warps = thread % self.size // WARP
        self.programs = (first + self.places).astype(np.int32)
        self.shared = SharedMemory(count, launch.shared_size)
        self.copies, self.products = PendingGroups(self.lanes), PendingGroups(self.lanes)
        self._registers: list[np.ndarray | None] = [None] * launch.program.registers
        x, y, z = launch.grid
        program, thread = self.programs.astype(U32), (thread % self.size).astype(U32)
        self._special = {
            "%tid.x": thread,
            "%ntid.x": U32.type(self.size),
            "%laneid": thread % WARP,
            "%warpid": thread // WARP,
            "%ctaid.x": program % x,
            "%ctaid.y": program // x % y,
            "%ctaid.z": program // (x * y),
            "%nctaid.x": U32.type(x),
            "%nctaid.y": U32.type(y),
            "%nctaid.z": U32.type(z),
            "%cluster_ctarank": U32.type(0),
            "global_smem": U32.type(0),
        }
        self._nobody = np.zeros(self.lanes, bool)

    def read(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """The value of an operand, its lower bits where it is wider than the dtype."""
        match operand:
            case Register(number, kind):
                value = self._registers[number]
                if value is None:  # nobody wrote it
                    value = np.array(-1).astype(unsigned(DTYPES[kind].itemsize)).view(DTYPES[kind])
            case Immediate(bits):
                value = np.array(bits & (1 << 64) - 1, U64)
            case Negated(predicate):
                return ~self.read(predicate, dtype)
            case Symbol(name) if name in self._special:
                value = np.asarray(self._special[name])
            case _:
                raise NotImplementedError(str(operand))
        if dtype.kind == "b" or value.dtype.kind == "b":
            return value.astype(dtype)
        return (value if value.itemsize == dtype.itemsize else value.astype(unsigned(dtype.itemsize))).view(dtype)

    def read_all(self, operand: Operand, dtype: np.dtype) -> np.ndarray:
        """The value of an operand in each thread."""
        return np.broadcast_to(self.read(operand, dtype), self.lanes)

    def write(self, operand: Operand, value: np.ndarray, mask: Mask) -> None:
        """Sets a register in the masked threads. A wider register is extended by the sign of a signed dtype."""
        if operand == Symbol("_"):
            return
        number, kind = operand
        if kind == "pred":
            value = value.astype(bool)
        else:
            target = unsigned(DTYPES[kind].itemsize)
            if value.itemsize != target.itemsize:
                value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{target.itemsize}")
            value = value.view(target)
        if mask is not None:
            before = self._registers[number]
            value = np.where(mask, value, np.array(-1).astype(value.dtype) if before is None else before)
        self._registers[number] = value

    def active(self, mask: Mask) -> np.ndarray:
        """The numbers of the masked threads."""
        return np.arange(self.lanes) if mask is None else np.flatnonzero(mask)

    def addresses(self, operand: Address, active: np.ndarray) -> np.ndarray:
        """Addresses [active] in int64."""
        kind = operand.base.kind if isinstance(operand.base, Register) else "b32"
        base = self.read_all(operand.base, unsigned(DTYPES[kind].itemsize))
        return base[active].astype(np.int64) + operand.offset

    def positions(self, operand: Address, active: np.ndarray, size: int) -> np.ndarray:
        """Positions [active] of `size` bytes in shared memory."""
        return self.shared.positions(self.places[active], self.addresses(operand, active), size)

    def load_shared(self, operand: Address, active: np.ndarray, size: int, count: int) -> np.ndarray:
        """Unsigned numbers [active, count] of `size` bytes."""
        positions = self.positions(operand, active, size * count)
        return self.shared.load(positions, size, count, self.warps[active])

    def store_shared(self, operand: Address, active: np.ndarray, values: np.ndarray) -> None:
        """Writes unsigned values [active, count]."""
        positions = self.positions(operand, active, values.itemsize * values.shape[1])
        self.shared.store(positions, values, self.warps[active])

    def whole(self, mask: Mask, size: int) -> np.ndarray:
        """Which groups of `size` threads are active. A group must be active as a whole."""
        groups = np.ones((self.lanes // size, 1), bool) if mask is None else mask.reshape(-1, size)
        if (groups.any(1) != groups.all(1)).any():
            raise Fault(f"only some threads of a group of {size} take part")
        return groups.any(1)

    def run(self, code: list[Execute]) -> None:
        """Executes instructions until all threads have returned."""
        waiting: dict[int, Mask] = {0: None}  # the threads whose next instruction is the one of that index
        while waiting:
            index = min(waiting)
            mask = waiting.pop(index)
            while True:
                instruction = self.launch.program.code[index]
                some, rest = self._split(instruction.guard, mask)
                if instruction.opcode in ("bra", "ret", "exit"):
                    if instruction.opcode == "bra":
                        self._join(waiting, instruction.target, some)
                    self._join(waiting, index + 1, rest)
                    break
                if some is None or some.any():
                    self._execute(code[index], instruction, some)
                index += 1
                if index in waiting:
                    self._join(waiting, index, mask)
                    break

    def _execute(self, execute: Execute, instruction: Instruction, mask: Mask) -> None:
        try:
            execute(self, mask)
        except Fault as fault:
            place = f"{self.launch.program.name}, {instruction.source}"
            raise Fault(f"{place}: {fault}: {instruction.text}") from None

    def _split(self, guard: Register | Negated | None, mask: Mask) -> tuple[Mask, Mask]:
        """The threads that a guard lets through, and the others."""
        if guard is None:
            return mask, self._nobody
        passes = self.read_all(guard, DTYPES["pred"])
        if passes.all():
            return mask, self._nobody
        return (passes, ~passes) if mask is None else (passes & mask, ~passes & mask)

    def _join(self, waiting: dict[int, Mask], index: int, mask: Mask) -> None:
        if mask is not None and not mask.any():
            return
        other = waiting.get(index, self._nobody)
        joined = None if mask is None or other is None else mask | other
        waiting[index] = None if joined is None or joined.all() else joined
