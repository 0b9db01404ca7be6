"""Copies that run next to the threads: cp.async, tiles of tensor maps (TMA), and the mbarriers that they arrive at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .formats import DTYPES, U32, U64, unsigned
from .instructions import Execute, instruction, type_error
from .memory import Fault
from .program import Instruction

if TYPE_CHECKING:
    from .machine import TensorMap, Threads


class PendingGroups:
    """Asynchronous operations of the threads, each finished when its thread waits for its group."""

    def __init__(self, lanes: int) -> None:
        self._committed = np.zeros(lanes, int)  # the number of groups that each thread has committed
        self._pending: list[tuple[np.ndarray, np.ndarray, Callable[[np.ndarray], None]]] = []

    def issue(self, active: np.ndarray, finish: Callable[[np.ndarray], None]) -> None:
        """Adds an operation of threads [n] to their open groups. `finish` gets those of it that are due, bool [n]."""
        self._pending.append((active, self._committed[active], finish))

    def commit(self, active: np.ndarray) -> None:
        self._committed[active] += 1

    def wait(self, active: np.ndarray, newest: int = 0) -> None:
        """Finishes all committed groups of the threads but the newest ones."""
        waits = np.zeros(len(self._committed), bool)
        waits[active] = True
        left = []
        for threads, groups, finish in self._pending:
            due = waits[threads] & (groups < self._committed[threads] - newest)
            if due.any():
                finish(due)
            if not due.all():
                left.append((threads[~due], groups[~due], _rest(finish, ~due)))
        self._pending = left


def _rest(finish: Callable[[np.ndarray], None], left: np.ndarray) -> Callable[[np.ndarray], None]:
    def finish_rest(due: np.ndarray) -> None:
        chosen = np.zeros(len(left), bool)
        chosen[left] = due
        finish(chosen)

    return finish if left.all() else finish_rest


@instruction("cp.async", modifiers="c[ag]|shared|global|L2_\\w+")
def _copy(ins: Instruction) -> Execute:
    """Copies 4, 8 or 16 bytes to shared memory: the first ones from global memory, and zeros for the others."""
    destination, source, size, *available = ins.operands

    def execute(threads, mask):
        active = threads.active(mask)
        positions = threads.positions(destination, active, size.bits)
        data = np.zeros((len(active), size.bits // 4), U32)
        reads = threads.read_all(available[0] if available else size, U32)[active]
        if not np.isin(reads, (0, size.bits)).all():
            raise type_error(ins)
        chosen = active[reads > 0]
        data[reads > 0] = threads.launch.memory.load(
            threads.addresses(source, chosen), 4, size.bits // 4, 1 + threads.programs[chosen]
        )
        warps = threads.warps[active]

        def finish(due):
            threads.shared.store(positions[due], data[due], warps[due])

        threads.shared.claim(positions, size.bits, warps)
        threads.copies.issue(active, finish)

    return execute


@instruction("cp.async.commit_group")
def _commit_copies(_: Instruction) -> Execute:
    return lambda threads, mask: threads.copies.commit(threads.active(mask))


@instruction("cp.async.wait_group")
def _wait_for_copies(ins: Instruction) -> Execute:
    (newest,) = ins.operands
    return lambda threads, mask: threads.copies.wait(threads.active(mask), newest.bits)


@dataclass
class Barrier:
    """An mbarrier. A phase ends when all arrivals and all bytes have come."""

    expected: int
    missing: int
    missing_bytes: int = 0
    phase: int = 0
    tiles: list[Callable[[], int]] = field(default_factory=list)  # under way; each returns its bytes when it lands

    def land(self) -> None:
        """Lets all tiles that are under way land, and ends the phase if nothing is missing."""
        while self.tiles:
            self.missing_bytes -= self.tiles.pop(0)()
        if self.missing == self.missing_bytes == 0:
            self.missing, self.phase = self.expected, self.phase ^ 1


def _barrier(threads: Threads, position: int) -> Barrier:
    if position not in threads.barriers:
        raise Fault("the mbarrier is not initialized")
    return threads.barriers[position]


@instruction("mbarrier.init", modifiers="shared_cta|shared")
def _initialize(ins: Instruction) -> Execute:
    operand, count = ins.operands

    def execute(threads, mask):
        active = threads.active(mask)
        for x, n in zip(threads.positions(operand, active, 8), threads.read_all(count, U32)[active], strict=True):
            threads.barriers[int(x)] = Barrier(int(n), int(n))

    return execute


@instruction("mbarrier.inval", modifiers="shared_cta|shared")
def _invalidate(ins: Instruction) -> Execute:
    (operand,) = ins.operands

    def execute(threads, mask):
        for x in threads.positions(operand, threads.active(mask), 8):
            if _barrier(threads, int(x)).tiles:
                raise Fault("the mbarrier is invalidated while a tile is under way")
            del threads.barriers[int(x)]

    return execute


@instruction("mbarrier.arrive.expect_tx", modifiers="shared_cta|shared")
def _arrive(ins: Instruction) -> Execute:
    _, operand, size = ins.operands

    def execute(threads, mask):
        active = threads.active(mask)
        positions = threads.positions(operand, active, 8)
        for x, n in zip(positions, threads.read_all(size, U32)[active], strict=True):
            barrier = _barrier(threads, int(x))
            barrier.missing_bytes += int(n)
            barrier.missing -= 1

    return execute


@instruction("mbarrier.try_wait", modifiers="parity|shared_cta|shared")
def _wait_for_barrier(ins: Instruction) -> Execute:
    """Waits for the end of the phase of a parity. Tiles land now."""
    destination, operand, parity = ins.operands

    def execute(threads, mask):
        active = threads.active(mask)
        parities = threads.read_all(parity, U32)[active]
        positions = threads.positions(operand, active, 8)
        for x in np.unique(positions):
            barrier = _barrier(threads, int(x))
            barrier.land()
            if (parities[positions == x] == barrier.phase).any():
                raise Fault("waits without end")
        threads.write(destination, np.ones((), bool), mask)

    return execute


@instruction("cp.async.bulk.tensor", modifiers="2d|shared_cta|shared_cluster|global|tile|mbarrier_complete_tx_bytes")
def _copy_tile(ins: Instruction) -> Execute:
    destination, source, barrier = ins.operands[:3]
    if ins.operands[3:]:
        raise type_error(ins)

    def execute(threads, mask):
        active = threads.active(mask)
        starts = threads.positions(destination, active, 128)
        maps = threads.read_all(source.map, U64)[active]
        columns, rows = (threads.read_all(x, DTYPES["s32"])[active].astype(int) for x in source.coordinates)
        for i, x in enumerate(threads.positions(barrier, active, 8)):
            tensor = threads.tensor_map(int(maps[i]))
            positions = _tile_positions(threads, tensor, starts[i])
            threads.shared.claim(positions.ravel(), 16, np.full(positions.size, threads.warps[active[i]]))
            tile = tensor, rows[i], columns[i], positions, threads.programs[active[i]]
            _barrier(threads, int(x)).tiles.append(lambda tile=tile: _land(threads, *tile))

    return execute


def _tile_positions(threads: Threads, tensor: TensorMap, start: int) -> np.ndarray:
    """Positions of the 16-byte units of a tile [rows, units]."""
    width = tensor.box[1] * tensor.itemsize
    if width % 16 or (tensor.swizzle and width > tensor.swizzle):
        raise Fault(f"rows of {width} bytes do not fit into a swizzle of {tensor.swizzle}")
    part, start = divmod(int(start), threads.shared.stride)
    units = start + np.arange(0, tensor.box[0] * width, 16)
    programs = np.full(len(units), part)
    return threads.shared.positions(programs, swizzled(units, tensor.swizzle), 16).reshape(-1, width // 16)


def _land(threads: Threads, tensor: TensorMap, row: int, column: int, positions: np.ndarray, program: int) -> int:
    """Writes a tile, with zeros outside of the matrix. Returns its bytes."""
    rows, columns = row + np.arange(tensor.box[0])[:, None], column + np.arange(tensor.box[1])
    inside = (rows >= 0) & (rows < tensor.shape[0]) & (columns >= 0) & (columns < tensor.shape[1])
    addresses = (tensor.address + (rows * tensor.row_stride + columns) * tensor.itemsize)[inside]
    programs = np.full(len(addresses), 1 + program)
    tile = np.zeros(inside.shape, unsigned(tensor.itemsize))
    tile[inside] = threads.launch.memory.load(addresses, tensor.itemsize, 1, programs)[:, 0]
    threads.shared.fill(positions, tile)
    return tile.nbytes


def swizzled(addresses: np.ndarray, width: int) -> np.ndarray:
    """Addresses in shared memory whose 16-byte units are permuted in rows of `width` bytes (0, 32, 64 or 128)."""
    units = {0: 0, 32: 1, 64: 3, 128: 7}[width]
    return addresses ^ (addresses >> 7 & units) << 4
