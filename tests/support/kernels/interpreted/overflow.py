"""Checks integer operations of kernels in Triton's interpreter for overflow.

Triton's own check takes ten operations of `triton.language` for each, and asserts their result only in debug mode.
"""

import operator

import numpy as np
from triton.language.semantic import TritonSemantic

OPERATIONS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def install(monkeypatch) -> None:
    """Makes the interpreter raise an AssertionError, or an error that contains it, where a GPU wraps around."""

    def check(semantic, lhs, rhs, operation):
        dtype = lhs.dtype
        if dtype.int_bitwidth >= 64:
            return
        exact = OPERATIONS[operation.__name__](*(x.handle.data.astype(np.int64) for x in (lhs, rhs)))
        fits = dtype.get_int_min_value() <= exact.min() and exact.max() <= dtype.get_int_max_value()
        assert fits, f"{dtype} overflows in {operation.__name__}"

    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check)
