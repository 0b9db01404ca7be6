"""Makes Triton's interpreter compute right in bfloat16.

Triton 3.9 holds bfloat16 values as uint16, and NumPy computes with these bit patterns: products,
sums and comparisons are wrong, and a cast from float32 truncates. Here the values are held as
float32. Each operation is computed in float32 and its result rounded to the nearest bfloat16 value,
ties to even, as PTX does (`fma.rn.bf16`, `cvt.rn.bf16.f32`).
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

ROUNDING_MODES = (None, interpreter._ir.ROUNDING_MODE.RTNE)


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 values rounded to bfloat16, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), nearest.view(np.float32))


def to_bits(x: np.ndarray) -> np.ndarray:
    """The uint16 bit patterns of float32 values rounded to bfloat16."""
    return (rounded(x).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def is_bfloat16(dtype) -> bool:
    return not isinstance(dtype, tl.pointer_type) and dtype.scalar.name == tl.bfloat16.name  # faster than ==


def install(monkeypatch) -> None:
    """Replaces the interpreter's operations.

    In blocks, elements that a mask leaves out of a load without `other` have all bits set (NaN, -1,
    True).
    """
    stock_dtype, fits = interpreter._get_np_dtype, interpreter._validate_np_data_size
    check = TensorHandle.__post_init__
    cast, cast_float, bitcast = (
        getattr(InterpreterBuilder, x) for x in ("cast_impl", "create_fp_to_fp", "create_bitcast")
    )
    fabs, store = InterpreterBuilder.create_fabs, InterpreterBuilder.create_masked_store

    found: dict[str, np.dtype] = {}

    def dtype_in_memory(dtype):
        """As the interpreter's own function, which makes a table of all dtypes in each call."""
        name = dtype.scalar.name
        if name not in found:
            found[name] = stock_dtype(dtype)
        return found[name]

    def check_and_round(handle):
        check(handle)
        if is_bfloat16(handle.dtype):
            handle.data = rounded(handle.data)

    def cast_impl(builder, src, dst_type):
        if is_bfloat16(dst_type):
            return TensorHandle(src.data.astype(np.float32), tl.bfloat16)
        if is_bfloat16(src.dtype):
            return TensorHandle(src.data.astype(dtype_in_memory(dst_type)), dst_type.scalar)
        return cast(builder, src, dst_type)

    def create_fp_to_fp(builder, src, dst_type, rounding_mode):
        if not (is_bfloat16(src.dtype) or is_bfloat16(dst_type)):
            return cast_float(builder, src, dst_type, rounding_mode)
        if rounding_mode not in ROUNDING_MODES or 8 in (x.scalar.primitive_bitwidth for x in (src.dtype, dst_type)):
            raise NotImplementedError(f"{src.dtype} to {dst_type}, rounding mode {rounding_mode}")
        return cast_impl(builder, src, dst_type)

    def create_bitcast(builder, src, dst_type):
        if is_bfloat16(src.dtype):
            src = TensorHandle(to_bits(src.data), tl.uint16)
        if is_bfloat16(dst_type):
            return TensorHandle(from_bits(src.data.view(np.uint16)), tl.bfloat16)
        return bitcast(builder, src, dst_type)

    def create_fabs(builder, x):
        return TensorHandle(np.abs(x.data), tl.bfloat16) if is_bfloat16(x.dtype) else fabs(builder, x)

    def create_masked_load(builder, pointers, mask, other, cache_policy, is_volatile):
        dtype = pointers.get_element_ty()
        in_memory = dtype_in_memory(dtype)
        if other is not None:
            fill = to_bits(other.data) if is_bfloat16(dtype) else other.data
        elif pointers.data.size == 1:  # Triton passes None for an `other` that is a scalar 0
            fill = np.zeros(pointers.data.shape, in_memory)
        else:
            bits = np.full(in_memory.itemsize, 0xFF, np.uint8).view(in_memory)
            fill = np.full(pointers.data.shape, True if in_memory.kind == "b" else bits[0])
        loaded = interpreter._interpreter.load(pointers.data, mask.data, fill, in_memory)
        return TensorHandle(from_bits(loaded) if is_bfloat16(dtype) else loaded, dtype)

    def create_masked_store(builder, pointers, value, mask, cache_policy):
        if is_bfloat16(value.dtype):
            value = TensorHandle(to_bits(value.data), tl.uint16)
        return store(builder, pointers, value, mask, cache_policy)

    def numpy_dtype(dtype):
        return np.dtype(np.float32) if is_bfloat16(dtype) else dtype_in_memory(dtype)

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
    monkeypatch.setattr(interpreter, "_validate_np_data_size", lambda x, dtype: is_bfloat16(dtype) or fits(x, dtype))
    monkeypatch.setattr(TensorHandle, "__post_init__", check_and_round)
    for operation in (cast_impl, create_fp_to_fp, create_bitcast, create_fabs, create_masked_load, create_masked_store):
        monkeypatch.setattr(InterpreterBuilder, operation.__name__, operation)
