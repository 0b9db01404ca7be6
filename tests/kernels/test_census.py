"""Compiles the kernels for eight architectures and checks registers, spills, shared memory and instructions.

This needs no GPU.
"""

import math
import re

import pytest

pytest.importorskip("triton")

from fastdpo.kernels import gather_keys, linear_logps
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

ALIKE = {"sm86": "sm80", "sm89": "sm80", "gfx950": "gfx942"}  # architectures with the ceilings of another one
# Maximum number of registers per thread; the comments list the numbers with Triton 3.9. Registers
# determine occupancy: an NVIDIA multiprocessor runs 8 programs of 8 warps at 32 registers, 6 at 40,
# 5 at 48 and 4 at 64. gfx942 reaches full occupancy at 64.
CEILINGS = {
    "forward": dict(sm80=48, sm90=40, sm100=40, sm120=40, gfx942=48),  # 47, 32, 38, 36, 36
    "forward, statistics": dict(sm80=64, sm90=64, sm100=64, sm120=64, gfx942=48),  # 61, 56, 53, 54, 41
    "forward of a head": dict(sm80=64, sm90=64, sm100=64, sm120=80, gfx942=64),  # sm120: 80 with Triton 3.6
    "backward": dict(sm80=40, sm90=40, sm100=40, sm120=40, gfx942=48),  # 32, 30, 32, 40, 31
    "backward, entropy": dict(sm80=48, sm90=40, sm100=48, sm120=48, gfx942=48),  # 40, 40, 42, 44, 38
    "backward of a head": dict(sm80=40, sm90=40, sm100=40, sm120=40, gfx942=48),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ROW_KERNELS)
def test_registers_allow_the_intended_occupancy(case: str, target: str):
    registers, spills = registers_and_spills(compile_row_kernel(target, case))
    assert spills == 0
    assert registers <= CEILINGS[case][ALIKE.get(target, target)]


@pytest.mark.parametrize("target", ["sm80", "gfx942"])  # the targets with the most registers, one per vendor
@pytest.mark.parametrize("case", ["forward of a head", "backward, entropy"])  # the cases with the most work
@pytest.mark.parametrize("variant", ROW_VARIANTS)
def test_no_variant_spills(variant, case, target):
    assert registers_and_spills(compile_row_kernel(target, case, variant))[1] == 0


@pytest.mark.parametrize("target", [target for target in TARGETS if target.startswith("sm")])
def test_32_warps_fit_a_multiprocessor(target):
    """65,536 registers are 64 for each of their threads."""
    registers, spills = registers_and_spills(compile_row_kernel(target, "forward of a head", warps=32))
    assert spills == 0
    assert registers <= 64


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
SPILLS = {  # maximum bytes of stack by head size (comments: with Triton 3.9); 0 for kernels that are not listed
    (64, "forward", "sm90"): 16,  # 0, with Triton 3.6 16
    (64, "keys", "sm80"): 32,  # 0, with Triton 3.6 32
    (64, "keys", "sm86"): 8,  # 0, with Triton 3.6 8
    (64, "keys", "sm89"): 8,  # 0, with Triton 3.6 8
    (64, "keys", "sm100"): 8,  # 8
    (64, "keys", "sm120"): 8,  # 0, with Triton 3.6 8
    (64, "queries", "sm100"): 24,  # 0, with Triton 3.6 24
    (64, "queries", "sm120"): 8,  # 0, with Triton 3.6 8
    (128, "forward", "sm80"): 56,  # 56
    (128, "forward", "sm86"): 72,  # 72
    (128, "forward", "sm89"): 72,  # 72
    (128, "forward", "sm100"): 288,  # 280
    (128, "keys", "sm80"): 32,  # 32
    (128, "keys", "sm86"): 24,  # 16, with Triton 3.6 24
    (128, "keys", "sm89"): 24,  # 16, with Triton 3.6 24
    (128, "keys", "sm90"): 80,  # 24, with Triton 3.6 80
    (128, "keys", "sm100"): 64,  # 56
    (128, "keys", "gfx942"): 16,  # 16
    (128, "keys", "gfx950"): 32,  # 32
    (128, "queries", "sm80"): 16,  # 16
    (128, "queries", "gfx950"): 4,  # 2
    (256, "forward", "sm100"): 128,  # 120
    (256, "queries", "sm100"): 224,  # 216
    (256, "keys", "gfx942"): 16,  # 0, with Triton 3.6 10
    (256, "forward", "gfx950"): 8,  # 0, with Triton 3.6 8
    (256, "keys", "gfx950"): 1,  # 0, with Triton 3.6 1
    (256, "keys", "sm86"): 8,  # 0, with Triton 3.6 8
    (256, "keys", "sm89"): 8,  # 0, with Triton 3.6 8
    (256, "keys", "sm90"): 208,  # 208
    (256, "keys", "sm100"): 64,  # 56
    (128, "forward", "sm120"): 48,  # 16, with Triton 3.6 48
    (128, "keys", "sm120"): 48,  # 48
    (256, "queries", "sm120"): 16,  # 16
    (256, "keys", "sm120"): 32,  # 32
}
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_attention_fits_spills_little_and_uses_tensor_cores(d, name, target):
    compiled = compile_attention(target, name, d)
    assert compiled.metadata.shared <= SHARED_MEMORY[target]
    _, spills = registers_and_spills(compiled)
    assert spills <= SPILLS.get((d, name, target), 0)
    assert PRODUCTS[target] in (compiled.asm.get("ptx") or compiled.asm["amdgcn"])


REPEATED = {  # products executed over those needed
    # The two warp groups repeat two of four products of 64 keys. Both sums of 128 keys would take all registers.
    (256, "keys", "sm90"): 1.5,
}


def products_executed(compiled):
    """Multiplications that the instructions of all warps compute, each instruction counted once."""
    ptx, warps = compiled.asm["ptx"], compiled.metadata.num_warps
    of_a_warp = re.findall(r"mma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", ptx)
    of_four = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", ptx)
    counts = [math.prod(map(int, shape)) for shape in of_a_warp] * 4 + [math.prod(map(int, x)) for x in of_four]
    return sum(counts) * warps // 4


def products_needed(compiled):
    """Multiplications of the products in the kernel, each product counted once."""
    shapes = re.findall(r"tt\.dot .*: tensor<(\d+)x(\d+)x\w+> \* tensor<\d+x(\d+)x", compiled.asm["ttir"])
    return sum(math.prod(map(int, shape)) for shape in shapes)


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm120"])
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_attention_computes_each_product_once(d, name, target):
    compiled = compile_attention(target, name, d)
    assert products_executed(compiled) == REPEATED.get((d, name, target), 1) * products_needed(compiled)


@pytest.mark.parametrize(("d", "features"), [(64, "plain"), (128, "all")])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_with_other_head_sizes_and_options(name, d, features):
    compiled = compile_attention("sm90", name, d, features)
    assert registers_and_spills(compiled)[1] <= (208 if (name, d) == ("keys", 128) else 48)  # 160, with Triton 3.6 208
    assert PRODUCTS["sm90"] in compiled.asm["ptx"]


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
        gather_keys._gather_keys_bwd_kernel,
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
    assert registers <= 64
    code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    assert re.search(r"ld\.global(\.\S+)?\.v[24]\.b32|(global|buffer)_load_dwordx[24]", code)
