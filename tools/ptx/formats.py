"""The types of PTX as NumPy dtypes, and bfloat16, which NumPy lacks."""

import numpy as np

DTYPES = {
    **{f"{kind}{n}": np.dtype(f"u{n // 8}") for kind in "bu" for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"f{n}": np.dtype(f"f{n // 8}") for n in (16, 32, 64)},
    "pred": np.dtype(bool),
}
U8, U16, U32, U64 = (DTYPES[f"u{n}"] for n in (8, 16, 32, 64))
F32 = DTYPES["f32"]
NAN = np.array(0x7FFFFFFF, U32).view(F32)[()]
# Types of one or two numbers that are read as bits. `unpacked` gives the numbers.
AS_BITS = {"bf16": U16, "f16": U16, "bf16x2": U32, "f16x2": U32, "f32x2": U64}
TYPES = {*DTYPES, *AS_BITS}


def unsigned(size: int) -> np.dtype:
    """The unsigned dtype of a number of bytes."""
    return np.dtype(f"u{size}")


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits).astype(U32) << 16).view(F32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of float32 values rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(x, F32).view(U32)
    nearest = (bits + U32.type(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), U16.type(0x7FFF), nearest.astype(U16))


def unpacked(bits: np.ndarray, kind: str) -> np.ndarray:
    """float32 values of a type in AS_BITS. Where it has two numbers, they are the last dimension."""
    if kind == "f32x2":
        return np.stack([bits & 0xFFFFFFFF, bits >> 32], -1).astype(U32).view(F32)
    if kind.endswith("x2"):
        bits = np.stack([bits & 0xFFFF, bits >> 16], -1).astype(U16)
    return from_bfloat16(bits) if kind.startswith("bf16") else bits.view(DTYPES["f16"]).astype(F32)


def packed(x: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of `unpacked`, rounding to nearest."""
    x = np.asarray(x, F32)
    if kind == "f32x2":
        bits = x.view(U32).astype(U64)
        return bits[..., 0] | bits[..., 1] << 32
    bits = to_bfloat16(x) if kind.startswith("bf16") else x.astype(DTYPES["f16"]).view(U16)
    if kind.endswith("x2"):
        return bits[..., 0].astype(U32) | bits[..., 1].astype(U32) << 16
    return bits


def canonical(x: np.ndarray) -> np.ndarray:
    """Replaces every NaN by the one that a GPU computes."""
    nan = np.isnan(x)
    return np.where(nan, NAN, x) if nan.any() else x


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 values as zeros."""
    return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32.type(0), x), x)
