"""Triton's interpreter as the tests change it: checks of every access and of overflow.

Its arithmetic in bfloat16 is that which the accuracy of the kernels is tested with.
"""

import pytest
import torch
import triton
import triton.language as tl

BF16 = torch.bfloat16


@triton.jit
def _masked_kernel(out_ptr, x_ptr, n, FILL: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n, other=FILL))


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.int32], ids=str)
def test_loads_without_other_are_filled_with_set_bits(dtype):
    x = torch.arange(64).to(dtype)
    out = torch.empty_like(x)
    _masked_kernel[(1,)](out, x, 32, FILL=-2, N=64)
    assert torch.equal(out, torch.where(torch.arange(64) < 32, x, -2))
    _masked_kernel[(1,)](out, x, 32, FILL=None, N=64)
    assert torch.equal(out[:32], x[:32])
    assert (out[32:] == -1 if dtype == torch.int32 else out[32:].isnan()).all()


@triton.jit
def _shift_kernel(out_ptr, x_ptr, n, shift, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + tl.maximum(i - shift, 0), tl.load(x_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def _roll_kernel(out_ptr, x_ptr, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + (i + 1) % n, mask=i < n), mask=i < n)


def test_disjoint_accesses_pass():
    x, out = torch.randn(100), torch.empty(100)
    _shift_kernel[(4,)](out, x, 100, 0, N=32)
    assert torch.equal(out, x)
    _roll_kernel[(4,)](out, x, 100, N=32)  # several programs read an element, and one writes
    assert torch.equal(out, x.roll(-1))


def test_loads_outside_of_the_arguments_raise():
    with pytest.raises(Exception, match=r"_shift_kernel: a load of program .* outside"):
        _shift_kernel[(4,)](torch.empty(101), torch.randn(100), 101, 0, N=32)


def test_stores_outside_of_the_arguments_raise():
    with pytest.raises(Exception, match=r"_shift_kernel: a store of program .* outside"):
        _shift_kernel[(4,)](torch.empty(99), torch.randn(100), 100, 0, N=32)


def test_elements_that_two_programs_write_raise():
    with pytest.raises(Exception, match=r"a store of program \(1, 0, 0\) races"):
        _shift_kernel[(4,)](torch.empty(100), torch.randn(100), 100, 40, N=32)


@pytest.mark.parametrize(("n", "access"), [(100, "store"), (33, "load")])
def test_reading_what_another_program_writes_raises(n, access):
    """Programs that write what a previous one read, and that read what a previous one wrote."""
    x = torch.randn(n)
    with pytest.raises(Exception, match=f"a {access} of program .* races"):
        _roll_kernel[(4,)](x, x, n, N=32)


@triton.jit
def _offset_kernel(out_ptr, row, stride, WIDE: tl.constexpr):
    if WIDE:
        row = row.to(tl.int64)
    tl.store(out_ptr, row * stride)


def test_a_product_of_sizes_that_overflows_is_found():
    out = torch.zeros(1, dtype=torch.int64)
    _offset_kernel[(1,)](out, 1 << 20, 1 << 15, WIDE=True)
    assert out.item() == 1 << 35
    with pytest.raises(Exception, match="int32 overflows in mul"):
        _offset_kernel[(1,)](out, 1 << 20, 1 << 15, WIDE=False)
