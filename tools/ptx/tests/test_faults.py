"""Faults planted in kernels, each of which the execution of their PTX must notice."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fastdpo.accuracy import error
from fastdpo.ops import definitions, packed_attention
from tools.ptx import ops
from tools.ptx.memory import Fault

ROWS = torch.tensor(
    [[0, 0, 0, 160]], dtype=torch.int32
)  # the last block of queries and the last one of keys are partial


def alone(x):
    """A copy at the start of memory that belongs to no other tensor."""
    memory = np.zeros(x.nbytes + (1 << 20), np.uint8)
    return torch.from_numpy(memory[: x.nbytes]).view(x.dtype).view(x.shape).copy_(x)


def attention():
    q, k, v = (alone(torch.randn(160, 1, 64).bfloat16()) for _ in range(3))
    exact = definitions.packed_attention(q.double(), k.double(), v.double(), ROWS)
    return error(packed_attention(q, k, v, ROWS), exact)


WAIT_FOR_COPIES = r"cp\.async\.wait_group\s+(\d+);"
FAULTS = {  # a function, architectures, what is replaced by what, how it is noticed
    "no barriers": (attention, ("sm80", "sm90"), r"bar\.sync\s+0;", "", "warps race in shared memory"),
    "no wait for copies": (attention, ("sm80", "sm90"), WAIT_FOR_COPIES, "", "wrong"),
    "a wait that leaves one copy more": (
        attention,
        ("sm80", "sm90"),
        WAIT_FOR_COPIES,
        lambda found: f"cp.async.wait_group {int(found[1]) + 1};",
        "wrong|race",
    ),
    "copies without their masks": (
        attention,
        ("sm80", "sm90"),
        r"(cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], \w+), %r\d+;",
        r"\1;",
        "outside of all arguments",
    ),
    "stores without their masks": (attention, ("sm80", "sm90"), r"@%p\d+ (st\.global)", r"\1", "outside|race"),
    "a store over the next program": (
        attention,
        ("sm80",),
        r"(st\.global\.v4\.b32 \[ %rd\d+ \+) 0",
        r"\1 16",
        "race|outside",
    ),
    "a misaligned store": (attention, ("sm80",), r"(st\.global\.v4\.b32 \[ %rd\d+ \+) 0", r"\1 8", "misaligned"),
    "a mask of scores inverted": (
        attention,
        ("sm80", "sm90"),
        r"(selp\.f32\s+%\w+), (%\w+), (0fFF800000)",
        r"\1, \3, \2",
        "wrong",
    ),
    "no wait for products": (attention, ("sm90",), r"wgmma\.wait_group\.sync\.aligned\s+\d+;", "", "wrong"),
    "products that are never committed": (attention, ("sm90",), r"wgmma\.commit_group\.sync\.aligned;", "", "wrong"),
    "a swizzle off by one": (attention, ("sm80", "sm90"), r"(and\.b32\s+%r\d+, %r\d+), 112;", r"\1, 96;", "wrong"),
}
CASES = [(name, architecture) for name, fault in FAULTS.items() for architecture in fault[1]]


@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_a_planted_fault_is_noticed(name, architecture, monkeypatch):
    call, _, pattern, replacement, noticed = FAULTS[name]
    replaced = 0

    def plant(ptx):
        nonlocal replaced
        edited, count = re.subn(pattern, replacement, ptx)
        replaced += count
        return edited

    ops.install(monkeypatch, architecture, plant)
    try:
        found = "nothing" if call() < 0.05 else "wrong results"
    except Fault as fault:
        found = str(fault)
    assert re.search(noticed, found)
    assert replaced


def test_nothing_is_noticed_without_a_fault(launches):
    assert attention() < 0.01
    assert launches


@triton.jit
def _overlapping_kernel(out_ptr, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + index % 100, index.to(tl.float32))


@triton.jit
def _neighbor_kernel(out_ptr, N: tl.constexpr):
    """A program reads what the next one writes."""
    index = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + index, tl.load(out_ptr + index + N) + 1)


@triton.jit
def _beyond_kernel(out_ptr, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + index, index.to(tl.float32))


@pytest.mark.parametrize(
    ("kernel", "size", "noticed"),
    [
        (
            _overlapping_kernel,
            128,
            r"_overlapping_kernel, test_faults.py:\d+: program \d writes element \d+, a race .*: @%p1 st\.global",
        ),
        (_neighbor_kernel, 160, "a race with another program"),
        (_beyond_kernel, 127, "outside of all arguments"),
    ],
)
def test_wrong_kernels(kernel, size, noticed, launches):
    with pytest.raises(Fault, match=noticed):
        kernel[(4,)](alone(torch.zeros(size)), N=32, enable_fp_fusion=True)
    _beyond_kernel[(4,)](out := torch.full((128,), torch.nan), N=32, enable_fp_fusion=True)
    assert torch.equal(out, torch.arange(128.0))


def test_an_unknown_instruction_raises_with_its_name(monkeypatch):
    for name in ("red.global.b32", "st.volatile.global.b32"):  # an opcode, and a modifier
        ops.install(monkeypatch, "sm80", lambda ptx, name=name: ptx.replace("st.global.b32", name))
        with pytest.raises(NotImplementedError, match=rf"unknown instruction: .*{name} "):
            _beyond_kernel[(4,)](torch.zeros(128), N=32, enable_fp_fusion=True)
