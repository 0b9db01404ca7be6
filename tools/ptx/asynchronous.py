"""Copies that run next to the threads: cp.async."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .formats import U32
from .instructions import Execute, instruction, type_error
from .program import Instruction


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


def swizzled(addresses: np.ndarray, width: int) -> np.ndarray:
    """Addresses in shared memory whose 16-byte units are permuted in rows of `width` bytes (0, 32, 64 or 128)."""
    units = {0: 0, 32: 1, 64: 3, 128: 7}[width]
    return addresses ^ (addresses >> 7 & units) << 4
