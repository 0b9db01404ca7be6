"""Compiles the kernels for four architectures, which takes no GPU: what they may spill, hold and address with."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fastdpo.kernels import token_logps as kernels  # noqa: E402

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FORWARD, BACKWARD = kernels._token_logps_fwd_kernel, kernels._token_logps_bwd_kernel
CASES = {  # a kernel, and the results or upstream gradients that TRL's DPOTrainer has it compute
    "forward": (FORWARD, {}),  # of the reference model
    "forward, statistics": (FORWARD, dict(entropy_ptr="*fp32", mean_logits_ptr="*fp32", is_top1_ptr="*i1")),
    "backward": (BACKWARD, dict(grad_logps_ptr="*fp32")),
    "backward, entropy": (BACKWARD, dict(grad_logps_ptr="*fp32", grad_entropy_ptr="*fp32")),
}
# Registers a thread may take, beside what Triton 3.9 came to. They are what occupancy depends on: a multiprocessor of
# NVIDIA's holds 8 programs of 8 warps at 32 registers, 6 at 40, 5 at 48, 4 at 64; one of gfx942 is full at 64.
CEILINGS = {
    "forward": dict(sm80=48, sm90=40, sm100=40, gfx942=48),  # 47, 32, 38, 36
    "forward, statistics": dict(sm80=64, sm90=64, sm100=64, gfx942=48),  # 61, 56, 53, 41
    "backward": dict(sm80=40, sm90=40, sm100=40, gfx942=48),  # 32, 30, 32, 31
    "backward, entropy": dict(sm80=48, sm90=40, sm100=48, gfx942=48),  # 40, 32, 40, 36
}
VARIANTS = {  # what other models bring
    "softcap": dict(scale="fp32", cap="fp32"),
    "float32 logits": dict(logits_ptr="*fp32", grad_ptr="*fp32"),
    "rows not aligned": dict(ALIGNED=False),
}


def compile_for(target, case, variant=None):
    """The kernel as its launcher would have it compiled: bfloat16, a vocabulary that is a multiple of 16."""
    kernel, asked = CASES[case]
    given = {
        **dict.fromkeys(("logits_ptr", "grad_ptr"), "*bf16"),
        **dict.fromkeys(("logps_ptr", "shift_ptr", "others_ptr", "total_ptr"), "*fp32"),
        **dict(targets_ptr="*i64", stride="i32", V="i32"),
        **dict(LANES=kernels.LANES, BLOCK_V=kernels.BLOCK_V, VEC=8, ALIGNED=True),
        **asked,
        **VARIANTS.get(variant, {}),
    }
    if given["logits_ptr"] == "*fp32":
        given["VEC"] = 4
    types = {name: given.get(name) for name in kernel.arg_names}
    types = {name: kind if isinstance(kind, str) else "constexpr" for name, kind in types.items()}
    aligned = ("logits_ptr", "grad_ptr", "targets_ptr", "stride", "V") if given["ALIGNED"] else ()
    source = ASTSource(
        kernel,
        types,
        {name: given.get(name) for name, kind in types.items() if kind == "constexpr"},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in types},
    )
    options = dict(num_warps=kernels.NUM_WARPS, enable_fp_fusion=True)
    return triton.compile(source, target=TARGETS[target], options=options)


def registers_and_spills(compiled, target, folder):
    if target.startswith("gfx"):
        fields = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", compiled.asm["amdgcn"]))
        return int(fields["vgpr_count"]), int(fields["vgpr_spill_count"])
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    listing = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", listing.stdout).groups()
    return int(registers), int(stack)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_registers_leave_room_for_enough_programs(case, target, tmp_path):
    registers, spills = registers_and_spills(compile_for(target, case), target, tmp_path)
    assert spills == 0
    assert registers <= CEILINGS[case][target]


@pytest.mark.parametrize("target", ["sm80", "gfx942"])  # the most registers on either side
@pytest.mark.parametrize("case", ["forward, statistics", "backward, entropy"])  # the most that each can be asked for
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_spills(variant, case, target, tmp_path):
    assert registers_and_spills(compile_for(target, case, variant), target, tmp_path)[1] == 0


@pytest.mark.parametrize("case", CASES)
def test_rows_are_addressed_in_64_bits(case):
    """16.7k tokens of 128k words are beyond int32; no CPU has the memory to try."""
    ir = compile_for("sm90", case).asm["ttir"]
    for pointer in ("logits_ptr", "grad_ptr") if case.startswith("backward") else ("logits_ptr",):
        (offset,) = re.findall(rf"tt\.addptr %{pointer}, (%\S+) : !tt\.ptr<bf16>, i64", ir)
        row, size = re.search(rf"{offset} = arith\.muli (%\S+), (%\S+) : i64", ir).groups()
        for factor in (row, size):
            assert re.search(rf"{factor} = arith\.extsi %\S+ : i32 to i64", ir)


@pytest.mark.parametrize(("target", "load"), [("sm90", "ld.global.v4.b32"), ("gfx942", "global_load_dwordx4")])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_loaded_16_bytes_at_a_time(case, target, load):
    asm = compile_for(target, case).asm
    code = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    assert load in code
    assert len(re.findall(r"ld\.global\S*b16|global_load_ushort", code)) <= 1  # the target's own
