"""The instructions, each against a result that was worked out by hand."""

import struct

import numpy as np
import pytest
import torch

from tools.ptx.machine import Launch
from tools.ptx.memory import Fault, GlobalMemory
from tools.ptx.program import Program

MODULE = """
.version 8.7
.target sm_90
.address_size 64
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 out
)
.reqntid {threads}
{{
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<16>;
    .reg .b64 %d<8>;
    ld.param.b64 %d0, [out];
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %d1, %r0, 4;
    add.s64 %d0, %d0, %d1;
{body}
    st.global.b32 [%d0], %r1;
    ret;
}}
"""
ONE, MINUS_TWO, HALF, NAN = (f"0f{struct.pack('>f', x).hex()}" for x in (1.0, -2.0, 0.5, float("nan")))


def run(body, threads=32, shared=0):
    """The int32 that each thread has in %r1."""
    out = torch.zeros(threads, dtype=torch.int32)
    program = Program(MODULE.format(body=body, threads=threads))
    address = out.data_ptr().to_bytes(8, "little")
    Launch(program, (1, 1, 1), {"out": address}, GlobalMemory([out]), shared).run()
    return out.numpy()


INTEGERS = {
    "add.s32 %r1, 2147483647, 1;": -(2**31),
    "sub.s32 %r1, 3, 5;": -2,
    "mul.lo.s32 %r1, 65536, 65537;": 65536,
    "mul.hi.u32 %r1, -1, -1;": -2,
    "mul.wide.s32 %d2, -3, 5; cvt.u32.u64 %r1, %d2;": -15,
    "mad.lo.s32 %r1, 3, 4, 5;": 17,
    "div.s32 %r1, -7, 2;": -3,
    "rem.s32 %r1, -7, 2;": -1,
    "div.u32 %r1, -1, 65536;": 65535,
    "min.s32 %r1, -1, 1;": -1,
    "min.u32 %r1, -1, 1;": 1,
    "shl.b32 %r1, 1, 32;": 0,
    "shr.u32 %r1, -1, 28;": 15,
    "shr.s32 %r1, -16, 40;": -1,
    "bfe.u32 %r1, 0xABCD, 4, 8;": 0xBC,
    "bfe.s32 %r1, 0xABCD, 4, 8;": 0xBC - 256,
    "and.b32 %r1, 12, 10;": 8,
    "or.b32 %r1, 12, 10;": 14,
    "xor.b32 %r1, 12, 10;": 6,
    "not.b32 %r1, 0;": -1,
    "cvt.s64.s32 %d2, -1; shr.u64 %d2, %d2, 60; cvt.u32.u64 %r1, %d2;": 15,
    "mov.b64 %d2, {1, 2}; mov.b64 {%r2, %r1}, %d2;": 2,
    "setp.lt.u32 %p1, 1, -1; selp.b32 %r1, 5, 7, %p1;": 5,
    "setp.lt.s32 %p1, 1, -1; selp.b32 %r1, 5, 7, %p1;": 7,
    f"setp.ne.f32 %p1, {NAN}, {ONE}; selp.b32 %r1, 5, 7, %p1;": 7,
    f"setp.neu.f32 %p1, {NAN}, {ONE}; selp.b32 %r1, 5, 7, %p1;": 5,
    f"setp.gt.f32 %p1, {ONE}, {HALF}; @!%p1 mov.b32 %r1, 7; @%p1 mov.b32 %r1, 5;": 5,
    f"cvt.rzi.s32.f32 %r1, {MINUS_TWO};": -2,
    f"cvt.rn.bf16x2.f32 %r1, {ONE}, {MINUS_TWO};": 0x3F80C000,
    f"mov.b64 %d2, {{{HALF}, {ONE}}}; add.f32x2 %d2, %d2, %d2; mov.b64 {{%r2, %r1}}, %d2;": 0x40000000,
    f"cvt.rn.f16x2.f32 %r1, {ONE}, {MINUS_TWO};": 0x3C00C000,
    "cvt.rn.bf16.f32 %h1, 0f3F808000; cvt.u32.u16 %r1, %h1;": 0x3F80,  # halfway: to even
    "cvt.rn.bf16.f32 %h1, 0f3F818000; cvt.u32.u16 %r1, %h1;": 0x3F82,
}
FLOATS = {
    f"add.f32 %r1, {ONE}, {HALF};": 1.5,
    f"fma.rn.f32 %r1, {MINUS_TWO}, {HALF}, {HALF};": -0.5,
    "fma.rn.f32 %r1, 0f3F800001, 0f3F800001, 0fBF800002;": 2.0**-46,  # exactly (1 + e)^2 - (1 + 2e)
    "mul.ftz.f32 %r1, 0f00800000, 0f3F000000;": 0.0,
    "mul.f32 %r1, 0f00800000, 0f3F000000;": 2.0**-127,
    f"max.f32 %r1, {NAN}, {ONE};": 1.0,
    f"max.NaN.f32 %r1, {NAN}, {ONE};": float("nan"),
    f"div.full.f32 %r1, {ONE}, {MINUS_TWO};": -0.5,
    f"ex2.approx.ftz.f32 %r1, {MINUS_TWO};": 0.25,
    f"lg2.approx.f32 %r1, {HALF};": -1.0,
    f"neg.f32 %r1, {ONE};": -1.0,
    "cvt.rn.f32.s32 %r1, -3;": -3.0,
    "mov.b16 %h1, 0xC000; cvt.f32.bf16 %r1, %h1;": -2.0,
    "mov.b16 %h1, 0xC000; cvt.f32.f16 %r1, %h1;": -2.0,
}


@pytest.mark.parametrize("body", INTEGERS)
def test_integers(body):
    assert (run(body) == INTEGERS[body]).all()


@pytest.mark.parametrize("body", FLOATS)
def test_floats(body):
    assert np.array_equal(run(body).view(np.float32), np.full(32, FLOATS[body], np.float32), equal_nan=True)


LANE = np.arange(32)
SHUFFLES = {
    "bfly.b32 %r1, %r0, 5, 31, -1;": LANE ^ 5,
    "idx.b32 %r1, %r0, 3, 31, -1;": LANE * 0 + 3,
    "down.b32 %r1, %r0, 4, 31, -1;": np.where(LANE < 28, LANE + 4, LANE),
    "up.b32 %r1, %r0, 4, 0, -1;": np.where(LANE >= 4, LANE - 4, LANE),
    "idx.b32 %r1, %r0, 3, 6175, -1;": LANE // 8 * 8 + 3,  # segments of eight threads
}


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_shuffles(shuffle):
    assert np.array_equal(run(f"shfl.sync.{shuffle}"), SHUFFLES[shuffle])


def test_threads_diverge_and_meet():
    """Thread i goes i times through a loop, and odd threads skip what follows it."""
    loop = """
        mov.b32 %r1, 0;
        mov.b32 %r2, %r0;
    again:
        setp.eq.b32 %p1, %r2, 0;
        @%p1 bra done;
        add.s32 %r1, %r1, %r2;
        sub.s32 %r2, %r2, 1;
        bra.uni again;
    done:
        and.b32 %r3, %r0, 1;
        setp.ne.b32 %p2, %r3, 0;
        @%p2 bra end;
        add.s32 %r1, %r1, 1000;
    end:
        bar.sync 0;
    """
    assert np.array_equal(run(loop, threads=64), [i * (i + 1) // 2 + 1000 * (i % 2 == 0) for i in range(64)])


def test_matrices_move_between_registers_and_shared_memory():
    """stmatrix writes what ldmatrix reads, and each transposes the other's matrix."""
    rows = "shl.b32 %r2, %r0, 4; and.b32 %r2, %r2, 112;"
    copy = (
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%r0}; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];"
    )
    assert np.array_equal(run(rows + copy, shared=128), LANE)
    transposed = run(rows + copy.replace("x1.shared.b16 {", "x1.trans.shared.b16 {"), shared=128)
    halves = np.stack([LANE, 0 * LANE], 1).reshape(8, 8)  # the numbers that thread i holds are i and 0
    assert np.array_equal(transposed, (halves.T[:, ::2] + (halves.T[:, 1::2] << 16)).ravel())


@pytest.mark.parametrize(
    ("body", "shared", "fault"),
    [
        ("setp.lt.u32 %p1, %r0, 5; @%p1 bra end; bar.sync 0; end:", 0, "only some threads of a group of 64"),
        ("mul.lo.s32 %r2, %r0, 4; st.shared.b32 [%r2], %r0;", 128, "outside of 128 bytes shared memory"),
        ("mul.lo.s32 %r2, %r0, 2; st.shared.b32 [%r2], %r0;", 256, "misaligned"),
        ("st.global.b32 [%d0+4], %r0;", 0, "outside of all arguments"),
    ],
)
def test_faults(body, shared, fault):
    with pytest.raises(Fault, match=fault):
        run(body, threads=64, shared=shared)


def test_memory_that_nobody_wrote_is_nan():
    assert np.isnan(run("ld.shared.b32 %r1, [0];", shared=16).view(np.float32)).all()
    assert np.isnan(run("mov.b32 %r1, %r9;").view(np.float32)).all()
