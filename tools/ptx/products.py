"""Matrix products of a warp (mma.sync) and of a group of four warps (wgmma)."""

from __future__ import annotations

import re

import numpy as np

from .asynchronous import swizzled
from .formats import AS_BITS, DTYPES, F32, U32, U64, canonical, unpacked
from .instructions import WARP, Execute, instruction, type_error
from .memory import SEVERAL_WARPS
from .program import Instruction, Vector

GROUP = 4 * WARP


def _fragments(threads, registers, kind: str) -> np.ndarray:
    """Matrices of each warp [warps, 8, 8 * n], transposed from n registers of two 16-bit numbers."""
    words = np.stack([threads.read_all(x, U32) for x in registers], 1)
    values = unpacked(words, kind + "x2").reshape(-1, 8, 4, len(registers), 2)  # warp, row, pair, register, number
    return values.transpose(0, 1, 3, 2, 4).reshape(-1, 8, 8 * len(registers))


def _left(threads, registers, kind: str) -> np.ndarray:
    """The left operand of each warp [warps, 16, 16]: its upper and lower rows alternate between registers."""
    upper, lower = (_fragments(threads, registers[i::2], kind) for i in range(2))
    return np.concatenate([upper, lower], 1)


def _accumulators(threads, registers) -> np.ndarray:
    """float32 [warps, 16, columns]: of each 8 columns, a thread holds two in row i and two in row i + 8."""
    values = np.stack([threads.read_all(x, F32) for x in registers], 1)
    values = values.reshape(-1, 8, 4, len(registers) // 4, 2, 2)  # warp, row, pair, columns, half, number
    return values.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 2 * len(registers))


def _write_accumulators(threads, registers, values: np.ndarray, mask) -> None:
    values = canonical(values).reshape(-1, 2, 8, len(registers) // 4, 4, 2).transpose(0, 2, 4, 3, 1, 5)
    columns = np.ascontiguousarray(values.reshape(threads.lanes, len(registers)).T)
    for x, column in zip(registers, columns, strict=True):
        threads.write(x, column, mask)


@instruction("mma.sync", modifiers="aligned|m16n8k16|row|col")
def _warp_product(ins: Instruction) -> Execute:
    """`d = a @ b + c` with a [16, 16], b [16, 8] and float32 c, d [16, 8]."""
    kind = ins.types[1]
    if ins.types != ("f32", kind, kind, "f32") or kind not in AS_BITS:
        raise type_error(ins)
    d, a, b, c = (x.elements for x in ins.operands)

    def execute(threads, mask):
        threads.whole(mask, WARP)
        right = _fragments(threads, b, kind)  # [warps, 8, 16]
        product = _left(threads, a, kind) @ right.transpose(0, 2, 1)
        _write_accumulators(threads, d, product + _accumulators(threads, c), mask)

    return execute


@instruction("wgmma.mma_async", modifiers=r"sync|aligned|m64n\d+k16")
def _group_product(ins: Instruction) -> Execute:
    """`d = a @ b (+ d)` with a [64, 16], b [16, n] and float32 d [64, n].

    The product is computed when it is waited for. Until then, nothing may write its operands.
    """
    kind = ins.type
    n = next(int(x[1]) for x in (re.fullmatch(r"m64n(\d+)k16", x) for x in ins.modifiers) if x)
    d, a, b, scale_d, sign_a, sign_b, *transposed = ins.operands
    if ins.types != ("f32", kind, kind) or kind not in AS_BITS or any(x.bits != 1 for x in (sign_a, sign_b)):
        raise type_error(ins)
    transposed = [x.bits == 1 for x in transposed]  # a, if it is in shared memory, and b

    def execute(threads, mask):
        active = threads.active(mask)
        threads.whole(mask, GROUP)
        keeps = threads.read_all(scale_d, DTYPES["pred"])[::WARP, None, None]
        right_at = threads.read_all(b, U64)[::GROUP]
        left_at = None if isinstance(a, Vector) else threads.read_all(a, U64)[::GROUP]

        def finish(due):
            finished = np.zeros(threads.lanes, bool)
            finished[active[due]] = True
            groups = threads.whole(finished, GROUP)
            if left_at is None:
                left = _left(threads, a.elements, kind).reshape(-1, 64, 16)
            else:
                left = _shared_matrices(threads, left_at, groups, 64, transposed[0], kind)
            right = _shared_matrices(threads, right_at, groups, n, transposed[-1], kind)
            product = (left @ right.transpose(0, 2, 1)).reshape(-1, 16, n)
            before = _accumulators(threads, d.elements)
            total = np.where(keeps, before + product, product)
            _write_accumulators(threads, d.elements, total, None if finished.all() else finished)

        threads.products.issue(active, finish)

    return execute


@instruction("wgmma.commit_group", modifiers="sync|aligned")
def _commit_products(_: Instruction) -> Execute:
    return lambda threads, mask: threads.products.commit(threads.active(mask))


@instruction("wgmma.wait_group", modifiers="sync|aligned")
def _wait_for_products(ins: Instruction) -> Execute:
    (newest,) = ins.operands
    return lambda threads, mask: threads.products.wait(threads.active(mask), newest.bits)


def _shared_matrices(threads, descriptors, groups, extent: int, transposed: bool, kind: str) -> np.ndarray:
    """Matrices in shared memory [groups, extent, 16], one per group of warps. Only some groups are read."""
    result = np.zeros((len(groups), extent, 16), F32)
    for descriptor in np.unique(descriptors[groups]):
        chosen = np.flatnonzero(groups & (descriptors == descriptor))
        offsets = _unit_addresses(int(descriptor), extent, transposed)
        programs = np.repeat(threads.places[::GROUP][chosen], offsets.size)
        positions = threads.shared.positions(programs, np.tile(offsets.ravel(), len(chosen)), 16)
        values = unpacked(threads.shared.load(positions, 2, 8, SEVERAL_WARPS), kind).reshape(
            len(chosen), len(offsets), -1
        )
        result[chosen] = values.transpose(0, 2, 1) if transposed else values
    return result


def _unit_addresses(descriptor: int, extent: int, transposed: bool) -> np.ndarray:
    """Addresses of units of 8 elements: [extent, 2], or transposed [16, extent / 8].

    The layouts are those of "Asynchronous Warpgroup Level Matrix Shared Memory Layout" in the PTX ISA.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    width = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62]  # bytes of a swizzled row
    if descriptor >> 49 & 7 or (transposed and not width):
        raise NotImplementedError(f"unknown matrix descriptor {descriptor:#x}")
    if transposed:
        row, unit = np.arange(16)[:, None], np.arange(extent // 8)
        units = width // 16  # of a row
        addresses = row // 8 * stride + row % 8 * width + unit // units * leading + unit % units * 16
    else:
        row, unit = np.arange(extent)[:, None], np.arange(2)
        addresses = row // 8 * stride + row % 8 * (width or 16) + unit * (16 if width else leading)
    return swizzled(start + addresses, width)
