"""The kernels compiled for a GPU that need not be there, as the launchers compile them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastdpo.kernels import attention_blocks, packed_attention, packed_attention_backward, token_logps

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
"""The major compute capability of each target, None for AMD."""

Arguments = Mapping[str, Any]
"""The type of each runtime argument, such as "*bf16", and the value of each constant."""

FORWARD, BACKWARD = token_logps._token_logps_fwd_kernel, token_logps._token_logps_bwd_kernel
STATISTICS = dict(entropy_ptr="*fp32", mean_logits_ptr="*fp32", is_top1_ptr="*i1")  # those that TRL's DPOTrainer logs
LOGIT_ARGUMENTS = {
    **dict.fromkeys(("logits_ptr", "grad_ptr", "tile_ptr"), "*bf16"),
    **dict.fromkeys(("logps_ptr", "shift_ptr", "others_ptr", "total_ptr"), "*fp32"),
    **dict(targets_ptr="*i64", stride="i32", grad_stride="i32", tile_stride="i32", V="i32", written="i32"),
    **dict(BLOCK_V=token_logps.BLOCK_V, VEC=8, ALIGNED=True),
}
ROW_KERNELS = {  # a kernel, and its arguments as the launchers pass them: bfloat16 logits and the requested results
    "forward": (FORWARD, LOGIT_ARGUMENTS),  # of logits that are given
    "forward, statistics": (FORWARD, {**LOGIT_ARGUMENTS, **STATISTICS}),
    "forward of a head": (FORWARD, {**LOGIT_ARGUMENTS, **STATISTICS, "target_logits_ptr": "*fp32"}),
    "backward": (BACKWARD, {**LOGIT_ARGUMENTS, "grad_logps_ptr": "*fp32"}),
    "backward, entropy": (BACKWARD, {**LOGIT_ARGUMENTS, "grad_logps_ptr": "*fp32", "grad_entropy_ptr": "*fp32"}),
    "backward of a head": (BACKWARD, LOGIT_ARGUMENTS),  # recomputes a gradient tile
}
ROW_VARIANTS = {  # arguments of other models
    "softcap": dict(scale="fp32", cap="fp32"),
    "float32 logits": dict(logits_ptr="*fp32", grad_ptr="*fp32", tile_ptr="*fp32", VEC=4),
    "rows not aligned": dict(ALIGNED=False),
}
ROW_ALIGNED = {"logits_ptr", "grad_ptr", "tile_ptr", "targets_ptr", "stride", "grad_stride", "tile_stride", "V"}
ATTENTION = {
    "forward": packed_attention._packed_attention_fwd_kernel,
    "queries": packed_attention_backward._packed_attention_dq_kernel,
    "keys": packed_attention_backward._packed_attention_dkv_kernel,
}
ATTENTION_FEATURES = {"plain": {}, "all": dict(window="i32", cap="fp32")}
HEADS, KEY_HEADS = 32, 8


def compile_for(target: str, kernel: Any, arguments: Arguments, aligned: Collection[str] = (), **options: Any) -> Any:
    """Compiles a kernel for these types and constants. Arguments that are not given are None.

    Those in `aligned` are divisible by 16.
    """
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


def compile_row_kernel(target: str, case: str, variant: str | None = None, warps: int = token_logps.NUM_WARPS) -> Any:
    """Compiles one of `ROW_KERNELS`, for logits of one of `ROW_VARIANTS`."""
    kernel, arguments = ROW_KERNELS[case]
    given = ROW_VARIANTS[variant] if variant else {}
    arguments = {**arguments, **{name: kind for name, kind in given.items() if name != "tile_ptr" or name in arguments}}
    aligned = ROW_ALIGNED if arguments["ALIGNED"] else ()
    options = dict(num_warps=warps, enable_fp_fusion=kernel is FORWARD)
    return compile_for(target, kernel, {**arguments, "LANES": token_logps.LANES * warps}, aligned, **options)


def attention_configs(target: str, d: int) -> dict[str, attention_blocks.KernelConfig]:
    """The configuration that is used of each kernel of `ATTENTION`."""
    return dict(zip(ATTENTION, attention_blocks.kernel_configs(d, d, CAPABILITIES[target]), strict=True))


def attention_arguments(d: int, d_v: int, config: attention_blocks.KernelConfig, **features: str) -> Arguments:
    """Arguments as the launchers pass them: bfloat16, 32 query heads, 8 key heads."""
    return {
        **dict.fromkeys(("out_ptr", "q_ptr", "k_ptr", "v_ptr", "grad_ptr", "dq_ptr", "dk_ptr", "dv_ptr"), "*bf16"),
        **dict.fromkeys(("lse_ptr", "delta_ptr", "dk_parts_ptr", "dv_parts_ptr"), "*fp32"),
        **dict.fromkeys(("rows_ptr", "pieces_ptr", "first_piece_ptr"), "*i32"),
        **dict.fromkeys(("blocks_ptr", "programs_ptr", "readers_ptr"), "*i32"),
        **dict.fromkeys((f"stride_{x}{y}" for x in "qkv" for y in "th"), "i32"),
        **dict(T="i32", scale="fp32", gain="fp32", sinks_ptr="*fp32", has_sinks="i32"),
        **dict(H=HEADS, H_KV=KEY_HEADS, D=d, D_V=d_v),
        **dict(BLOCK_D=triton.next_power_of_2(d), BLOCK_DV=triton.next_power_of_2(d_v)),
        **dict(BLOCK_Q=config.block_q, BLOCK_K=config.block_k),
        **features,
    }


def compile_attention(
    target: str, name: str, d: int, features: str = "plain", config: attention_blocks.KernelConfig | None = None
) -> Any:
    """Compiles one of `ATTENTION`, for head size d and the configuration that is used unless one is given."""
    config = config or attention_configs(target, d)[name]
    arguments = attention_arguments(d, d, config, **ATTENTION_FEATURES[features])
    pointers = {name for name, kind in arguments.items() if isinstance(kind, str) and kind.startswith("*")}
    aligned = pointers | {name for name in arguments if name.startswith("stride")}
    return compile_for(target, ATTENTION[name], arguments, aligned, num_warps=config.warps, num_stages=config.stages)


def registers_and_spills(compiled: Any) -> tuple[int, int]:
    """Registers of each thread, and bytes of its stack, 4 for each register that is spilled on AMD."""
    if "amdgcn" in compiled.asm:
        fields = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", compiled.asm["amdgcn"]))
        return int(fields["vgpr_count"]), 4 * int(fields["vgpr_spill_count"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", _inspect(compiled, "cuobjdump", "--dump-resource-usage"))
    assert found is not None
    return int(found[1]), int(found[2])


def disassembly(compiled: Any) -> str:
    """The machine code of a kernel for NVIDIA."""
    return _inspect(compiled, "nvdisasm", "-c")


def _inspect(compiled: Any, tool: str, *options: str) -> str:
    """The output of one of the tools of CUDA that Triton brings with it."""
    with NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
        return subprocess.run([path, *options, cubin.name], capture_output=True, text=True, check=True).stdout
