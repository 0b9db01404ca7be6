"""Instructions on numbers: arithmetic, comparisons, conversions and bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from .formats import AS_BITS, DTYPES, F32, U32, canonical, flushed, packed, unpacked, unsigned
from .instructions import Execute, instruction, type_error
from .program import Alternatives, Instruction, Vector

Function = Callable[..., np.ndarray]
FLOAT = "rn|ftz|approx|full"


def _elementwise(ins: Instruction, function: Function) -> Execute:
    """`d = function(a, ...)` in the instruction's type. 16-bit numbers are computed in float32."""
    if len(ins.types) != 1:
        raise type_error(ins)
    destination, *operands = ins.operands
    kind, flushes = ins.type, "ftz" in ins.modifiers
    dtype = AS_BITS.get(kind) or DTYPES[kind]

    def execute(threads, mask):
        values = [threads.read(x, dtype) for x in operands]
        if kind in AS_BITS:
            values = [unpacked(x, kind) for x in values]
        if flushes:
            values = [flushed(x) for x in values]
        result = function(*values)
        if flushes:
            result = flushed(result)
        if kind == "f32" and ins.opcode not in ("neg", "abs"):
            result = canonical(result)
        threads.write(destination, packed(result, kind) if kind in AS_BITS else result.astype(dtype), mask)

    return execute


def _is_float(kind: str) -> bool:
    return kind in AS_BITS or DTYPES[kind].kind == "f"


@instruction("add", "sub", modifiers=FLOAT)
@instruction("and", "or", "xor", "not", "neg", "abs")
@instruction("ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", modifiers=FLOAT)
def _simple(ins: Instruction) -> Execute:
    functions = {
        **dict(add=np.add, sub=np.subtract, neg=np.negative, abs=np.abs),
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
        **dict(ex2=np.exp2, lg2=np.log2, rcp=np.reciprocal, sqrt=np.sqrt, tanh=np.tanh),
        "rsqrt": lambda x: 1 / np.sqrt(x),
    }
    return _elementwise(ins, functions[ins.opcode])


@instruction("min", "max", modifiers="NaN|ftz")
def _extremum(ins: Instruction) -> Execute:
    functions = dict(min=np.fmin, max=np.fmax) if "NaN" not in ins.modifiers else dict(min=np.minimum, max=np.maximum)
    function = functions[ins.opcode]
    return _elementwise(ins, lambda *operands: reduce(function, operands))


@instruction("mul", "mad", modifiers=f"{FLOAT}|lo|hi|wide")
def _multiply(ins: Instruction) -> Execute:
    """`d = a * b (+ c)`. `wide` doubles the type of d and c; `hi` takes the upper half of the product."""
    if "wide" not in ins.modifiers and "hi" not in ins.modifiers:
        return _elementwise(ins, lambda a, b, *c: a * b + c[0] if c else a * b)
    dtype = DTYPES[ins.type]
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
    if dtype.itemsize == 8 or ("hi" in ins.modifiers and ins.opcode == "mad"):
        raise type_error(ins)
    destination, a, b, *c = ins.operands

    def execute(threads, mask):
        product = threads.read(a, dtype).astype(wide) * threads.read(b, dtype).astype(wide)
        for x in c:
            product = product + threads.read(x, wide)
        if "hi" in ins.modifiers:
            product = (product >> 8 * dtype.itemsize).astype(dtype)
        threads.write(destination, product, mask)

    return execute


@instruction("fma", modifiers="rn|ftz")
def _fused(ins: Instruction) -> Execute:
    """One rounding: the product of two float32 numbers is exact in float64."""
    if ins.type == "f64":
        raise type_error(ins)
    return _elementwise(ins, lambda a, b, c: (np.float64(a) * b + c).astype(F32))


@instruction("div", "rem", modifiers=FLOAT)
def _divide(ins: Instruction) -> Execute:
    """Integers are divided toward zero. A quotient by zero is undefined, and zero here."""
    if _is_float(ins.type):
        return _elementwise(ins, np.divide)

    def divide(x, y):
        remainder = np.fmod(x, y)
        return remainder if ins.opcode == "rem" else (x - remainder) // y

    return _elementwise(ins, divide)


COMPARISONS = {
    **dict(eq=np.equal, ne=np.not_equal, lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal),
    **dict(lo=np.less, ls=np.less_equal, hi=np.greater, hs=np.greater_equal),
}
COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str) -> Function:
    """Comparisons with NaN are false, and true for names that end with "u"."""
    if name in ("nan", "num"):
        return lambda x, y: (np.isnan(x) | np.isnan(y)) == (name == "nan")
    if name == "ne":
        return lambda x, y: (x != y) & (x == x) & (y == y)
    if name in COMPARISONS:
        return COMPARISONS[name]
    return lambda x, y: COMPARISONS[name[:-1]](x, y) | (x != x) | (y != y)


@instruction("setp", modifiers="(eq|ne|lt|le|gt|ge)u?|lo|ls|hi|hs|num|nan|and|or|xor|ftz")
def _compare(ins: Instruction) -> Execute:
    dtype, compare = DTYPES[ins.type], _comparison(ins.modifiers[0])
    combine = next((COMBINATIONS[x] for x in ins.modifiers if x in COMBINATIONS), None)
    destination, a, b, *c = ins.operands
    if isinstance(destination, Alternatives) or "ftz" in ins.modifiers:
        raise type_error(ins)

    def execute(threads, mask):
        result = compare(threads.read(a, dtype), threads.read(b, dtype))
        threads.write(destination, combine(result, threads.read(c[0], DTYPES["pred"])) if combine else result, mask)

    return execute


@instruction("selp")
def _select(ins: Instruction) -> Execute:
    dtype, (destination, a, b, predicate) = DTYPES[ins.type], ins.operands

    def execute(threads, mask):
        chosen = threads.read(predicate, DTYPES["pred"])
        threads.write(destination, np.where(chosen, threads.read(a, dtype), threads.read(b, dtype)), mask)

    return execute


@instruction("mov", "cvta", modifiers="to|param|global|shared")
def _move(ins: Instruction) -> Execute:
    """Copies a value, or the parts of a vector to or from a wider register."""
    dtype, (destination, source) = DTYPES[ins.type], ins.operands

    def unpack(threads, mask):
        value = threads.read(source, dtype)
        bits = 8 * dtype.itemsize // len(destination.elements)
        for i, x in enumerate(destination.elements):
            threads.write(x, (value >> bits * i).astype(unsigned(bits // 8)), mask)

    def pack(threads, mask):
        bits = 8 * dtype.itemsize // len(source.elements)
        parts = [threads.read(x, unsigned(bits // 8)).astype(dtype) << bits * i for i, x in enumerate(source.elements)]
        threads.write(destination, sum(parts[1:], parts[0]), mask)

    if isinstance(destination, Vector):
        return unpack
    return (
        pack
        if isinstance(source, Vector)
        else lambda threads, mask: threads.write(destination, threads.read(source, dtype), mask)
    )


ROUNDINGS = dict(rni=np.rint, rzi=np.trunc, rmi=np.floor, rpi=np.ceil)


@instruction("cvt", modifiers="rn|r[nzmp]i")
def _convert(ins: Instruction) -> Execute:
    to, source = ins.types
    destination, *operands = ins.operands
    rounding = next((ROUNDINGS[x] for x in ins.modifiers if x in ROUNDINGS), None)
    if _is_float(source) and not _is_float(to) and rounding is None:
        raise type_error(ins)

    def read(threads, operand):
        if source in AS_BITS:
            return unpacked(threads.read(operand, AS_BITS[source]), source)
        value = threads.read(operand, DTYPES[source])
        return rounding(value) if rounding else value

    def execute(threads, mask):
        values = [read(threads, x) for x in operands]
        if to.endswith("x2"):
            upper, lower = np.broadcast_arrays(*values)
            result = packed(np.stack([lower, upper], -1), to)
        elif to in AS_BITS:
            result = packed(values[0], to)
        elif DTYPES[to].kind in "iu" and _is_float(source):
            limits = np.iinfo(DTYPES[to])
            result = np.nan_to_num(np.float64(values[0])).clip(limits.min, limits.max).astype(DTYPES[to])
        else:
            result = values[0].astype(DTYPES[to])
        threads.write(destination, result, mask)

    return execute


@instruction("shl", "shr")
def _shift(ins: Instruction) -> Execute:
    """Shifts by as many bits as the type has, or more, leave zeros, or the sign of signed numbers."""
    dtype, (destination, a, b) = DTYPES[ins.type], ins.operands
    bits = 8 * dtype.itemsize
    function = np.left_shift if ins.opcode == "shl" else np.right_shift

    def execute(threads, mask):
        count = threads.read(b, U32)
        result = function(threads.read(a, dtype), np.minimum(count, bits - 1).astype(dtype))
        if ins.opcode == "shl" or dtype.kind == "u":
            result = np.where(count < bits, result, dtype.type(0))
        threads.write(destination, result, mask)

    return execute


@instruction("bfe")
def _extract_bits(ins: Instruction) -> Execute:
    """`c` bits from bit `b` on, extended by their sign in a signed type."""
    if ins.type not in ("s32", "u32"):
        raise type_error(ins)
    destination, *operands = ins.operands

    def execute(threads, mask):
        value, first, count = (threads.read(x, U32).astype(np.int64) for x in operands)
        result = value >> first & (1 << count) - 1
        if ins.type == "s32":
            result = np.where(
                (count > 0) & (result >> np.maximum(count - 1, 0) & 1 == 1), result - (1 << count), result
            )
        threads.write(destination, result.astype(U32), mask)

    return execute
