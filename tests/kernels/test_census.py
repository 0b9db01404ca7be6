"""Compiles the kernels for eight architectures and checks registers, spills, shared memory and instructions.

This needs no GPU.
"""

import math
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fastdpo.kernels import gather_keys, linear_exp, linear_logps, packed_attention, token_logps  # noqa: E402
from fastdpo.ops import head_table  # noqa: E402

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm86": GPUTarget("cuda", 86, 32),
    "sm89": GPUTarget("cuda", 89, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "sm120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
CAPABILITIES = {"sm80": 8, "sm86": 8, "sm89": 8, "sm90": 9, "sm100": 10, "sm120": 12, "gfx942": None, "gfx950": None}
ALIKE = {"sm86": "sm80", "sm89": "sm80", "gfx950": "gfx942"}  # architectures with the ceilings of another one
FORWARD, BACKWARD = token_logps._token_logps_fwd_kernel, token_logps._token_logps_bwd_kernel
STATISTICS = dict(entropy_ptr="*fp32", mean_logits_ptr="*fp32", is_top1_ptr="*i1")  # those that TRL's DPOTrainer logs
LOGIT_ARGUMENTS = {
    **dict.fromkeys(("logits_ptr", "grad_ptr"), "*bf16"),
    **dict.fromkeys(("logps_ptr", "shift_ptr", "others_ptr", "total_ptr"), "*fp32"),
    **dict(targets_ptr="*i64", stride="i32", grad_stride="i32", V="i32"),
    **dict(LANES=token_logps.LANES, BLOCK_V=token_logps.BLOCK_V, VEC=8, ALIGNED=True),
}
TILE = dict(target_logits_ptr="*fp32", tile_ptr="*bf16", tile_stride="i32")
CASES = {  # a kernel, and its arguments as the launchers pass them: bfloat16 logits and the requested results
    "forward": (FORWARD, LOGIT_ARGUMENTS),  # the reference model
    "forward, statistics": (FORWARD, {**LOGIT_ARGUMENTS, **STATISTICS}),
    "forward of a head": (FORWARD, {**LOGIT_ARGUMENTS, **STATISTICS, **TILE}),
    "backward": (BACKWARD, {**LOGIT_ARGUMENTS, "grad_logps_ptr": "*fp32"}),
    "backward, entropy": (BACKWARD, {**LOGIT_ARGUMENTS, "grad_logps_ptr": "*fp32", "grad_entropy_ptr": "*fp32"}),
    "backward of a head": (BACKWARD, LOGIT_ARGUMENTS),  # recomputes a gradient tile
}
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
VARIANTS = {  # arguments of other models
    "softcap": dict(scale="fp32", cap="fp32"),
    "float32 logits": dict(logits_ptr="*fp32", grad_ptr="*fp32", tile_ptr="*fp32", VEC=4),
    "rows not aligned": dict(ALIGNED=False),
}
ALIGNED = {"logits_ptr", "grad_ptr", "tile_ptr", "targets_ptr", "stride", "grad_stride", "tile_stride", "V"}


def compile_for(target, kernel, arguments, aligned=frozenset(), **options):
    """Compiles the kernel for these types and constants. Arguments that are not given are None."""
    types = {name: arguments.get(name) for name in kernel.arg_names}
    types = {name: kind if isinstance(kind, str) else "constexpr" for name, kind in types.items()}
    source = ASTSource(
        kernel,
        types,
        {name: arguments.get(name) for name, kind in types.items() if kind == "constexpr"},
        {
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if name in aligned and kind != "constexpr"
        },
    )
    return triton.compile(source, target=TARGETS[target], options={"enable_fp_fusion": True, **options})


def compile_case(target, case, variant=None):
    kernel, arguments = CASES[case]
    given = VARIANTS.get(variant, {})
    arguments = {**arguments, **{name: kind for name, kind in given.items() if name != "tile_ptr" or name in arguments}}
    aligned = ALIGNED if arguments["ALIGNED"] else frozenset()
    options = dict(num_warps=token_logps.NUM_WARPS, enable_fp_fusion=kernel is FORWARD)
    return compile_for(target, kernel, arguments, aligned, **options)


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
def test_registers_allow_the_intended_occupancy(case, target, tmp_path):
    registers, spills = registers_and_spills(compile_case(target, case), target, tmp_path)
    assert spills == 0
    assert registers <= CEILINGS[case][ALIKE.get(target, target)]


@pytest.mark.parametrize("target", ["sm80", "gfx942"])  # the targets with the most registers, one per vendor
@pytest.mark.parametrize("case", ["forward of a head", "backward, entropy"])  # the cases with the most work
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_spills(variant, case, target, tmp_path):
    assert registers_and_spills(compile_case(target, case, variant), target, tmp_path)[1] == 0


@pytest.mark.parametrize("case", CASES)
def test_rows_are_addressed_in_64_bits(case):
    """Offsets exceed int32 from 16.7k tokens with 128k vocabulary entries on.

    A test with real tensors would not fit in the memory of most CPUs.
    """
    ir = compile_case("sm90", case).asm["ttir"]
    for pointer in {"logits_ptr", "grad_ptr", "tile_ptr"} & {*re.findall(r"%(\w+)", ir)}:
        (offset,) = re.findall(rf"tt\.addptr %{pointer}, (%\S+) : !tt\.ptr<bf16>, i64", ir)
        row, size = re.search(rf"{offset} = arith\.muli (%\S+), (%\S+) : i64", ir).groups()
        for factor in (row, size):
            assert re.search(rf"{factor} = arith\.extsi %\S+ : i32 to i64", ir)


@pytest.mark.parametrize(("target", "load"), [("sm90", "ld.global.v4.b32"), ("gfx942", "global_load_dwordx4")])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_loaded_16_bytes_at_a_time(case, target, load):
    asm = compile_case(target, case).asm
    code = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
    assert load in code
    assert len(re.findall(r"ld\.global\S*b16|global_load_ushort", code)) <= 1  # that of the target


def instructions(compiled, folder):
    """The instructions of each basic block of a kernel for NVIDIA."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    listing = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout
    blocks = re.split(r"^\.L_x_\d+:|\bBRA\b", listing, flags=re.M)
    return [re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z0-9.]+)", block, re.M) for block in blocks]


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("case", ["forward of a head", "backward", "backward of a head"])
def test_blocks_without_the_target_take_few_instructions(case, target, tmp_path):
    """Less than 8 for each logit that is read, exponentiated and written; those with the target take 11."""
    blocks = instructions(compile_case(target, case), tmp_path)
    of_tile = [block for block in blocks if {"MUFU.EX2", "STG.E.128"} <= {*block}]
    assert min(len(block) / block.count("MUFU.EX2") for block in of_tile) < 8


def attention_arguments(d, d_v, config, **features):
    """Arguments as the launchers pass them: bfloat16, 32 query heads, 8 key heads."""
    return {
        **dict.fromkeys(("out_ptr", "q_ptr", "k_ptr", "v_ptr", "grad_ptr", "dq_ptr", "dk_ptr", "dv_ptr"), "*bf16"),
        **dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32"),
        **dict.fromkeys(("rows_ptr", "pieces_ptr", "first_piece_ptr"), "*i32"),
        **dict.fromkeys(("blocks_ptr", "readers_ptr", "first_reader_ptr"), "*i32"),
        **dict.fromkeys((f"stride_{x}{y}" for x in "qkv" for y in "th"), "i32"),
        **dict(T="i32", scale="fp32", gain="fp32", H=32, H_KV=8, D=d, D_V=d_v),
        **dict(BLOCK_D=triton.next_power_of_2(d), BLOCK_DV=triton.next_power_of_2(d_v)),
        **dict(BLOCK_Q=config.block_q, BLOCK_K=config.block_k),
        **features,
    }


ATTENTION = {
    "forward": packed_attention._packed_attention_fwd_kernel,
    "queries": packed_attention._packed_attention_dq_kernel,
    "keys": packed_attention._packed_attention_dkv_kernel,
}
FEATURES = {
    "plain": {},
    "all": dict(window="i32", cap="fp32", sinks_ptr="*fp32"),
}
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


def compile_attention(target, name, d, features="plain"):
    config = dict(zip(ATTENTION, packed_attention.kernel_configs(d, d, CAPABILITIES[target]), strict=True))[name]
    arguments = attention_arguments(d, d, config, **FEATURES[features])
    pointers = {name for name, kind in arguments.items() if isinstance(kind, str) and kind.startswith("*")}
    aligned = pointers | {name for name in arguments if name.startswith("stride")}
    return compile_for(target, ATTENTION[name], arguments, aligned, num_warps=config.warps, num_stages=config.stages)


SPILLS = {  # maximum bytes of stack by head size (comments: with Triton 3.9); 0 for kernels that are not listed
    (64, "keys", "sm100"): 8,  # 8
    (64, "queries", "sm100"): 24,  # 0, with Triton 3.6 24
    (64, "queries", "sm120"): 8,  # 0, with Triton 3.6 8
    (128, "forward", "sm86"): 32,  # 24
    (128, "forward", "sm89"): 32,  # 24
    (128, "forward", "sm100"): 288,  # 280
    (128, "keys", "sm100"): 64,  # 56
    (128, "keys", "gfx942"): 16,  # 16
    (128, "keys", "gfx950"): 32,  # 32
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
def test_attention_fits_spills_little_and_uses_tensor_cores(d, name, target, tmp_path):
    compiled = compile_attention(target, name, d)
    assert compiled.metadata.shared <= SHARED_MEMORY[target]
    _, spills = registers_and_spills(compiled, target, tmp_path)
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
def test_attention_with_other_head_sizes_and_options(name, d, features, tmp_path):
    compiled = compile_attention("sm90", name, d, features)
    assert registers_and_spills(compiled, "sm90", tmp_path)[1] <= 48
    assert PRODUCTS["sm90"] in compiled.asm["ptx"]


CONFIG = linear_exp.FusedConfig()


def compile_fused_head(target, tma, requested, config=CONFIG):
    """Compiles the fused product in bfloat16.

    `requested` holds the arguments of requested results.
    """
    arguments = {
        "hidden": f"tensordesc<bf16[{config.block_n}, {config.block_d}]>" if tma else "*bf16",
        "weight": f"tensordesc<bf16[{config.block_v}, {config.block_d}]>" if tma else "*bf16",
        **dict(targets_ptr="*i64", anchors_ptr="*fp32", others_ptr="*fp32"),
        **dict(N="i32", V="i32", D="i32", stride_n="i32", stride_v="i32"),
        **dict(BLOCK_N=config.block_n, BLOCK_V=config.block_v, BLOCK_D=config.block_d, TMA=tma),
        **requested,
    }
    aligned = {"hidden", "weight", "tile_ptr", "stride_n", "stride_v", "tile_stride", "V", "D"} - (
        {"hidden", "weight"} if tma else set()
    )
    options = dict(num_warps=config.warps, num_stages=config.stages)
    return compile_for(target, linear_exp._linear_exp_kernel, arguments, aligned, **options)


@pytest.mark.parametrize(("target", "tma"), [("sm80", False), ("sm90", True), ("sm90", False), ("sm100", True)])
@pytest.mark.parametrize("requested", ["nothing", "tile", "tile and statistics"])
def test_a_fused_head_spills_little(requested, target, tma, tmp_path):
    given = {} if requested == "nothing" else dict(tile_ptr="*bf16", tile_stride="i32")
    if "statistics" in requested:
        given |= dict(weighted_ptr="*fp32", sum_ptr="*fp32", above_ptr="*fp32")
    compiled = compile_fused_head(target, tma, given)
    _, spills = registers_and_spills(compiled, target, tmp_path)
    assert spills <= 64
    assert PRODUCTS[target] in compiled.asm["ptx"]
    assert not tma or "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize(("target", "tma"), [("sm80", False), ("sm90", True), ("sm100", True), ("sm120", False)])
@pytest.mark.parametrize("blocks", head_table.CANDIDATES, ids=str)
def test_the_shared_memory_of_candidates_is_known(blocks, target, tma):
    """Those that do not fit a device are never tried."""
    config = linear_exp.FusedConfig(*blocks)
    given = dict(tile_ptr="*bf16", tile_stride="i32", weighted_ptr="*fp32", sum_ptr="*fp32", above_ptr="*fp32")
    compiled = compile_fused_head(target, tma, given, config)
    barriers = 256  # bytes
    assert 0 <= compiled.metadata.shared - head_table.shared_memory(config, target) <= barriers


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
def test_kernels_that_move_bytes_load_vectors(name, target, tmp_path):
    kernel, arguments, warps = SMALL[name]
    aligned = {x for x, kind in arguments.items() if isinstance(kind, str) and (kind[0] == "*" or "stride" in x)}
    compiled = compile_for(target, kernel, arguments, aligned | {"D", "V"}, num_warps=warps)
    registers, spills = registers_and_spills(compiled, target, tmp_path)
    assert spills == 0
    assert registers <= 64
    code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    assert re.search(r"ld\.global(\.\S+)?\.v[24]\.b32|(global|buffer)_load_dwordx[24]", code)
