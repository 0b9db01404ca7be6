"""Attention of one layer, forward and backward: padded, packed, and packed with shared prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.attention import AttentionWorkload
from benchmarks.sides.workload import draw_lengths
from benchmarks.suites.step import BOUNDS, PROFILES, SPREAD
from fastdpo.ops.attention.routes import BACKENDS

PADDED, UNSHARED = "padded, torch SDPA", "packed, prompts not shared"
SHAPES = {  # tokens of prompt, chosen and rejected
    "prompt as long as completions": (512, 512, 512),
    "short completions": (380, 35, 35),
    "short rows": (200, 80, 80),
    "long prompts": (3000, 300, 300),
}
PAIRS, GPU_PAIRS = 2, 16
GPU_HEADS, HEADS = (32, 8, 128), (4, 2, 64)  # query heads, key heads, head size


def sides(work: AttentionWorkload, backends: Sequence[str]) -> tuple[Side, ...]:
    """Padded attention, and packed attention with the default backend and each of `backends`."""
    packed = "benchmarks.sides.attention:PackedAttention"
    return (
        Side(PADDED, "benchmarks.sides.attention:PaddedAttention", work),
        Side(UNSHARED, packed, work, {"shared": False}),
        *(Side(f"{UNSHARED}, {name}", packed, work, {"shared": False, "backend": name}) for name in backends),
        Side(SUBJECT, packed, work, {"shared": True}),
        *(Side(f"{SUBJECT}, {name}", packed, work, {"shared": True, "backend": name}) for name in backends),
    )


def build_cases(quick: bool) -> list[Case]:
    on_gpu = torch.cuda.is_available()
    pairs = GPU_PAIRS if on_gpu else PAIRS
    shape = dict(zip(("heads", "kv_heads", "d"), GPU_HEADS if on_gpu else HEADS, strict=True))
    shape["dtype"] = "bfloat16" if on_gpu else "float32"
    compared = 1 if on_gpu else None  # comparing all heads of a GPU's cases takes the CPU longer than everything else
    batches = {name: (lengths,) * pairs for name, lengths in SHAPES.items()}
    batches |= {name: draw_lengths(*p, pairs, 0, spread=SPREAD, bounds=BOUNDS) for name, p in PROFILES.items()}
    if quick:
        batches = {"quick": ((20, 9, 14), (3, 5, 2))}
    cases = []
    for name, lengths in batches.items():
        group = "dataset lengths" if name in PROFILES else "fixed lengths"
        work = AttentionWorkload(lengths, **shape, compared=compared)
        cases.append(Case(name, group, sides(work, [*BACKENDS] if on_gpu else []), {"dtype": shape["dtype"]}))
    return cases


SUITE = Suite(
    name="attention",
    title="Attention of one layer, forward and backward",
    truth="benchmarks.sides.attention:ExactAttention",
    cases=build_cases,
    rounds=7,
    share_process_on_gpu=True,
    descriptions={
        PADDED: "`scaled_dot_product_attention` with `is_causal=True` and `enable_gqa=True` over right-padded rows, "
        "without a mask; on a CPU it runs torch's flash kernel.",
        UNSHARED: "`fastdpo.ops.packed_attention` over rows that each hold their own prompt.",
        SUBJECT: "`fastdpo.ops.packed_attention` over rows that share the prompts of their pairs.",
    },
)
