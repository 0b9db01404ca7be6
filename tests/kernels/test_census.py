"""Compiles the kernels for eight architectures and checks registers, spills, shared memory and instructions.

This needs no GPU.
"""

import re

import pytest

pytest.importorskip("triton")

import triton

from fastdpo.kernels import gather_keys, linear_logps, token_logps
from tests.support.kernels.compiled import (
    ATTENTION,
    ROW_KERNELS,
    ROW_VARIANTS,
    TARGETS,
    compile_attention,
    compile_for,
    compile_row_kernel,
    disassembly,
    registers_and_spills,
)
from tests.support.kernels.machine_code import Program

PROGRAMS = dict.fromkeys(TARGETS, 4) | {"sm120": 3}
"""Programs of a row kernel that a multiprocessor must be able to run at once.

Each waits for 8 KiB of logits. A bandwidth is reached with bandwidth x latency bytes under way: on a
B200 (8 TB/s, 148 multiprocessors) at 600 ns, 32 KiB for each multiprocessor. sm120 (1.8 TB/s, 188)
needs less, and gets less.
"""
REGISTERS = {"sm": 65_536, "gf": 4 * 512 * 64}  # of a multiprocessor, of 32 bits, by the vendor's prefix


def registers_for(programs: int, target: str, warps: int = token_logps.NUM_WARPS) -> int:
    """The most registers of a thread with which a multiprocessor runs so many programs, in the allocator's eights."""
    return REGISTERS[target[:2]] // (programs * warps * TARGETS[target].warp_size) // 8 * 8


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ROW_KERNELS)
def test_row_kernels_leave_registers_for_enough_programs(case: str, target: str):
    registers, spills = registers_and_spills(compile_row_kernel(target, case))
    assert spills == 0
    assert registers <= registers_for(PROGRAMS[target], target)


@pytest.mark.parametrize("target", ["sm80", "gfx942"])  # the targets with the most registers, one per vendor
@pytest.mark.parametrize("case", ["forward of a head", "backward, entropy"])  # the cases with the most work
@pytest.mark.parametrize("variant", ROW_VARIANTS)
def test_no_variant_spills(variant, case, target):
    assert registers_and_spills(compile_row_kernel(target, case, variant))[1] == 0


@pytest.mark.parametrize("target", [target for target in TARGETS if target.startswith("sm")])
def test_32_warps_fit_a_multiprocessor(target):
    registers, spills = registers_and_spills(compile_row_kernel(target, "forward of a head", warps=32))
    assert spills == 0
    assert registers <= registers_for(1, target, warps=32)


@pytest.mark.parametrize("case", ROW_KERNELS)
def test_rows_are_addressed_in_64_bits(case):
    """Offsets exceed int32 from 16.7k tokens with 128k vocabulary entries on.

    A test with real tensors would not fit in the memory of most CPUs.
    """
    ir = compile_row_kernel("sm90", case).asm["ttir"]
    for pointer in {"logits_ptr", "grad_ptr", "tile_ptr"} & {*re.findall(r"%(\w+)", ir)}:
        (offset,) = re.findall(rf"tt\.addptr %{pointer}, (%\S+) : !tt\.ptr<bf16>, i64", ir)
        ((row, size),) = re.findall(rf"{offset} = arith\.muli (%\S+), (%\S+) : i64", ir)
        for factor in (row, size):
            assert re.search(rf"{factor} = arith\.extsi %\S+ : i32 to i64", ir)


@pytest.mark.parametrize(("target", "load"), [("sm90", "ld.global.v4.b32"), ("gfx942", "global_load_dwordx4")])
@pytest.mark.parametrize("case", ROW_KERNELS)
def test_logits_are_loaded_16_bytes_at_a_time(case, target, load):
    asm = compile_row_kernel(target, case).asm
    code = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    assert load in code
    assert len(re.findall(r"ld\.global\S*b16|global_load_ushort", code)) <= 1  # that of the target


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("case", ["forward of a head", "backward", "backward of a head"])
def test_blocks_without_the_target_take_few_instructions(case, target):
    """Less than 8 for each logit that is read, exponentiated and written; those with the target take 11."""
    program = Program.parse(disassembly(compile_row_kernel(target, case)))
    turns = [turn for turn in map(program.turn, program.loops) if turn["write"]]
    assert turns
    for turn in turns:
        assert turn["issue"] < 8 * turn["mufu"]  # the exponentials


PRODUCTS = {
    "sm80": "mma.sync",
    "sm86": "mma.sync",
    "sm89": "mma.sync",
    "sm90": "wgmma.mma_async",
    "sm100": "tcgen05.mma",
    "sm120": "mma.sync",
    "gfx942": "v_mfma",
    "gfx950": "v_mfma",
}
STACK = 64  # bytes: a sixteenth of the 255 registers of a thread
LARGER_STACKS = {  # bytes by version of Triton, of kernels that spill more; each entry says why it may
    # Outside the loop of products: offsets of the first and the last tile.
    "forward, 128, sm86": {"3.6": 72, "3.9": 72},
    "forward, 128, sm89": {"3.6": 72, "3.9": 72},
    "keys, 128, sm90": {"3.6": 80},
    "keys, 256, sm90": {"3.9": 200},
    # Both sums of 128 keys fill the registers, and a window, a softcap and sinks come to them: in 1 of 25 instructions.
    "keys, 128, sm90, all": {"3.6": 200, "3.9": 160},
    # Sums leave tensor memory through registers. Other blocks are candidates where these can be timed.
    "forward, 128, sm100": {"3.6": 80, "3.9": 280},
    "forward, 256, sm100": {"3.6": 88, "3.9": 120},
    "queries, 256, sm100": {"3.6": 176, "3.9": 104},
    # 256 registers of 64 lanes, of which 512 would allow one program only.
    "keys, 128, gfx950": {"3.6": 76, "3.9": 132},
}
TRITON = ".".join(triton.__version__.split(".")[:2])
SHARED_MEMORY = {  # maximum bytes per program
    "sm80": 163 << 10,
    "sm86": 99 << 10,
    "sm89": 99 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "sm120": 99 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}


CASES = [
    *((name, d, target, "plain") for name in ATTENTION for d in (64, 128, 256) for target in TARGETS),
    *((name, 128, "sm90", "all") for name in ATTENTION),
]


def stack_of(name: str, d: int, target: str, features: str) -> dict[str, int]:
    """The entry of a case in `LARGER_STACKS`."""
    return LARGER_STACKS.get(f"{name}, {d}, {target}" + (f", {features}" if features != "plain" else ""), {})


@pytest.mark.parametrize(("name", "d", "target", "features"), CASES)
def test_attention_fits_spills_little_and_uses_tensor_cores(name, d, target, features):
    compiled = compile_attention(target, name, d, features)
    assert compiled.metadata.shared <= SHARED_MEMORY[target]
    stack = registers_and_spills(compiled)[1]
    listed = stack_of(name, d, target, features)
    if TRITON in listed:  # equal: an entry that is no longer needed goes
        assert stack == listed[TRITON] > STACK
    else:
        assert stack <= max(STACK, *listed.values(), 0)
    assert PRODUCTS[target] in (compiled.asm.get("ptx") or compiled.asm["amdgcn"])


@pytest.mark.parametrize(
    ("name", "d", "target", "features"), [case for case in CASES if case[2] in ("sm80", "sm86", "sm89", "sm90")]
)
def test_loops_of_products_hardly_touch_the_stack(name, d, target, features):
    program = Program.parse(disassembly(compile_attention(target, name, d, features)))
    turns = [turn for turn in map(program.turn, program.loops) if turn["products"]]
    assert turns
    for turn in turns:
        assert turn["stack"] <= (0.04 if features == "all" else 0.01) * turn["issue"]


SMALL = {  # kernels that mainly move memory, and their arguments
    "targets": (
        linear_logps._target_logits_kernel,
        {
            **dict(out_ptr="*fp32", hidden_ptr="*bf16", weight_ptr="*bf16", bias_ptr="*bf16", targets_ptr="*i64"),
            **dict(stride_n="i32", stride_v="i32", stride_d=1, D="i32", V="i32", BLOCK_D=linear_logps.BLOCK_D),
        },
        linear_logps.NUM_WARPS,
    ),
    "gather": (
        gather_keys._gather_keys_fwd_kernel,
        {
            **dict.fromkeys(("key_out_ptr", "value_out_ptr", "key_ptr", "value_ptr"), "*bf16"),
            **dict.fromkeys((f"{x}_stride_{y}" for x in ("key", "value") for y in "th"), "i32"),
            **dict(index_ptr="*i32", H_KV=8, H_V=8, D=128, D_V=128, BLOCK=1024),
        },
        gather_keys.NUM_WARPS,
    ),
    "sums over readers": (
        gather_keys._sum_places_kernel,
        {
            **dict.fromkeys(("key_grad_ptr", "value_grad_ptr", "placed_key_ptr", "placed_value_ptr"), "*bf16"),
            **dict(readers_ptr="*i32", first_reader_ptr="*i32", KEY_WIDTH=1024, VALUE_WIDTH=1024, BLOCK=1024),
        },
        gather_keys.NUM_WARPS,
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SMALL)
def test_kernels_that_move_bytes_load_vectors(name, target):
    kernel, arguments, warps = SMALL[name]
    aligned = {x for x, kind in arguments.items() if isinstance(kind, str) and (kind[0] == "*" or "stride" in x)}
    compiled = compile_for(target, kernel, arguments, aligned | {"D", "V"}, num_warps=warps)
    registers, spills = registers_and_spills(compiled)
    assert spills == 0
    assert registers <= registers_for(2 * PROGRAMS[target], target, warps)  # of half as many warps
    code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    assert re.search(r"ld\.global(\.\S+)?\.v[24]\.b32|(global|buffer)_load_dwordx[24]", code)
