"""Instructions that move data: loads, stores, shuffles within a warp, 8x8 matrices to and from shared memory."""

from __future__ import annotations

import numpy as np

from .formats import DTYPES, U16, U32, unsigned
from .instructions import WARP, Execute, instruction, type_error
from .program import Alternatives, Instruction, Vector


def _elements(operand):
    return operand.elements if isinstance(operand, Vector) else (operand,)


@instruction("ld.param")
def _load_parameter(ins: Instruction) -> Execute:
    dtype, (destination, address) = DTYPES[ins.type], ins.operands

    def execute(threads, mask):
        data = threads.launch.parameters[address.base.name]
        values = np.frombuffer(data, dtype, len(_elements(destination)), address.offset)
        for x, value in zip(_elements(destination), values, strict=True):
            threads.write(x, value, mask)

    return execute


@instruction("ld.global", "ld.shared", modifiers="v[248]|L1_evict_\\w+|nc")
def _load(ins: Instruction) -> Execute:
    dtype, (destination, address) = DTYPES[ins.type], ins.operands
    destinations, size = _elements(destination), dtype.itemsize

    def execute(threads, mask):
        active = threads.active(mask)
        if ins.modifiers[0] == "shared":
            values = threads.load_shared(address, active, size, len(destinations))
        else:
            addresses = threads.addresses(address, active)
            values = threads.launch.memory.load(addresses, size, len(destinations), 1 + threads.programs[active])
        for x, column in zip(destinations, values.T, strict=True):
            value = np.zeros(threads.lanes, unsigned(size))
            value[active] = column
            threads.write(x, value.view(dtype), mask)

    return execute


@instruction("st.global", "st.shared", modifiers="v[248]")
def _store(ins: Instruction) -> Execute:
    address, source = ins.operands
    sources, size = _elements(source), DTYPES[ins.type].itemsize

    def execute(threads, mask):
        active = threads.active(mask)
        values = np.stack([threads.read_all(x, unsigned(size))[active] for x in sources], 1)
        if ins.modifiers[0] == "shared":
            threads.store_shared(address, active, values)
        else:
            threads.launch.memory.store(threads.addresses(address, active), values, 1 + threads.programs[active])

    return execute


@instruction("shfl.sync", modifiers="bfly|idx|up|down")
def _shuffle(ins: Instruction) -> Execute:
    """Reads the register of another thread of the warp, or the own one where that is out of range."""
    mode = ins.modifiers[1]
    destination, source, b, c, _ = ins.operands
    if isinstance(destination, Alternatives):
        raise type_error(ins)

    def execute(threads, mask):
        threads.whole(mask, WARP)
        thread = np.arange(threads.lanes)
        lane = thread % WARP
        distance, bounds = threads.read(b, U32).astype(int), threads.read(c, U32).astype(int)
        segment = bounds >> 8 & 31
        first, last = lane & segment, lane & segment | bounds & 31 & ~segment
        other = dict(bfly=lane ^ distance, idx=first | distance & ~segment, down=lane + distance, up=lane - distance)[
            mode
        ]
        in_range = other >= last if mode == "up" else other <= last
        values = threads.read_all(source, U32)
        threads.write(destination, values[np.where(in_range, thread - lane + other, thread)], mask)

    return execute


# Each thread of a warp holds two neighbors of an 8x8 matrix of 16-bit elements.
ROW, COLUMN = np.divmod(np.arange(64).reshape(WARP, 2), 8)


@instruction("ldmatrix", modifiers="sync|aligned|m8n8|x[124]|trans|shared")
def _load_matrices(ins: Instruction) -> Execute:
    """Matrix i from the rows at the addresses of the threads 8i to 8i + 7."""
    destinations, address = ins.operands[0].elements, ins.operands[1]

    def execute(threads, mask):
        warps = np.flatnonzero(threads.whole(mask, WARP))
        for i, x in enumerate(destinations):
            rows = warps[:, None] * WARP + 8 * i + np.arange(8)
            matrices = threads.load_shared(address, rows.ravel(), 2, 8).reshape(-1, 8, 8)
            if "trans" in ins.modifiers:
                matrices = matrices.transpose(0, 2, 1)
            value = np.zeros((threads.lanes // WARP, WARP, 2), U16)
            value[warps] = matrices[:, ROW, COLUMN]
            threads.write(x, value.reshape(-1).view(U32), mask)

    return execute


@instruction("stmatrix", modifiers="sync|aligned|m8n8|x[124]|trans|shared")
def _store_matrices(ins: Instruction) -> Execute:
    """The inverse of ldmatrix."""
    address, sources = ins.operands[0], ins.operands[1].elements

    def execute(threads, mask):
        warps = np.flatnonzero(threads.whole(mask, WARP))
        for i, x in enumerate(sources):
            halves = np.ascontiguousarray(threads.read_all(x, U32)).view(U16).reshape(-1, WARP, 2)[warps]
            matrices = np.empty((len(warps), 8, 8), U16)
            matrices[:, ROW, COLUMN] = halves
            if "trans" in ins.modifiers:
                matrices = matrices.transpose(0, 2, 1)
            rows = warps[:, None] * WARP + 8 * i + np.arange(8)
            threads.store_shared(address, rows.ravel(), matrices.reshape(-1, 8))

    return execute
