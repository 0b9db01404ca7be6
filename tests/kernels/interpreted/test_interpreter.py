"""Triton's interpreter as the tests change it: arithmetic in bfloat16, and checks of every access and of overflow."""

import pytest
import torch
import triton
import triton.language as tl

BF16 = torch.bfloat16


@triton.jit
def _elementwise_kernel(out_ptr, x_ptr, y_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if OP == "add":
        z = x + y
    elif OP == "subtract":
        z = x - y
    elif OP == "multiply":
        z = x * y
    elif OP == "negate":
        z = -x
    elif OP == "absolute":
        z = tl.abs(x)
    elif OP == "compare":
        z = tl.where(x < y, x, y)
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "float32":
        z = tl.exp(x.to(tl.float32)).to(tl.bfloat16)
    elif OP == "float16":
        z = x.to(tl.float16).to(tl.bfloat16)
    elif OP == "integer":
        z = (i * 37 - 900).to(tl.bfloat16)
    elif OP == "constant":
        z = x * 0 + 3.1415926
    else:
        z = (x.to(tl.int16, bitcast=True) ^ 1).to(tl.bfloat16, bitcast=True)
    tl.store(out_ptr + i, z)


@triton.jit
def _cast_kernel(out_ptr, x_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def _reduce_kernel(out_ptr, x_ptr, OP: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i, k = tl.arange(0, N), tl.arange(0, K)
    x = tl.load(x_ptr + i[:, None] * K + k[None, :])
    if OP == "sum":
        tl.store(out_ptr + i, tl.sum(x, 1).to(tl.float32))
    elif OP == "maximum":
        tl.store(out_ptr + i, tl.max(x, 1).to(tl.float32))
    else:
        tl.store(out_ptr + i[:, None] * N + i[None, :], tl.dot(x, x.T, input_precision="ieee"))


@triton.jit
def _masked_kernel(out_ptr, x_ptr, n, FILL: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n, other=FILL))


ELEMENTWISE = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "negate": lambda x, y: -x,
    "absolute": lambda x, y: x.abs(),
    "compare": torch.minimum,
    "maximum": torch.maximum,
    "float32": lambda x, y: x.float().exp().to(BF16),
    "float16": lambda x, y: x.half().to(BF16),
    "integer": lambda x, y: (torch.arange(len(x)) * 37 - 900).to(BF16),
    "constant": lambda x, y: torch.full_like(x, 3.1415926),
    "bits": lambda x, y: (x.view(torch.int16) ^ 1).view(BF16),
}
VALUES = {
    "normal": torch.randn(256, generator=torch.Generator().manual_seed(0)),
    "ties": (torch.arange(256) * 2 + 1).float() / 512 + 1,
    "subnormal": torch.linspace(-1e-38, 1e-38, 256),
    "extreme": torch.tensor([torch.inf, -torch.inf, 3.4e38, -3.4e38, 65504.0, 1e-45, 0.0, -0.0] * 32),
}


@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise_operations(op):
    x, y = torch.randn(2, 256).to(BF16)
    out = torch.empty_like(x)
    _elementwise_kernel[(1,)](out, x, y, OP=op, N=256)
    assert torch.equal(out, ELEMENTWISE[op](x, y))


@pytest.mark.parametrize("values", VALUES)
def test_casts_round_to_nearest_even(values):
    out = torch.empty(256, dtype=BF16)
    _cast_kernel[(1,)](out, VALUES[values], N=256)
    assert torch.equal(out, VALUES[values].to(BF16))
    wide = torch.empty(256)
    _cast_kernel[(1,)](wide, out, N=256)
    assert torch.equal(wide, out.float())


def test_casts_keep_nan():
    x = torch.tensor([torch.nan, 1.0] * 16)
    x.view(torch.int32)[::4] = 0x7F800001  # the payload is in the bits that rounding drops
    out = torch.empty(32, dtype=BF16)
    _cast_kernel[(1,)](out, x, N=32)
    assert torch.equal(out.isnan(), x.isnan())


def test_products_are_summed_in_float32():
    x, out = torch.randn(32, 64).to(BF16), torch.empty(32, 32)
    _reduce_kernel[(1,)](out, x, OP="product", N=32, K=64)
    torch.testing.assert_close(out, x.float() @ x.float().T)


def test_reductions():
    x, out = torch.randn(16, 64).to(BF16), torch.empty(16)
    _reduce_kernel[(1,)](out, x, OP="maximum", N=16, K=64)
    assert torch.equal(out, x.float().amax(1))
    _reduce_kernel[(1,)](out, x, OP="sum", N=16, K=64)
    torch.testing.assert_close(out, x.float().sum(1), rtol=1e-2, atol=1e-2)


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
