"""Attention of one layer, forward and backward: padded, packed, and packed with shared prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import machine
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
FEATURES = {  # of a GPU's cases: pairs, and what differs from the cases before
    "header, 2 pairs": (((312, 300, 300),) * 2, {"header": 200}),
    "header, 8 pairs": (((312, 300, 300),) * 8, {"header": 200}),
    "header, 64 pairs": (((312, 300, 300),) * 64, {"header": 200}),
    "completions of one token": (((512, 1, 1),) * 16, {}),
    "window": (((3000, 300, 300),) * 4, {"window": 1024}),
    "softcap": (((512, 512, 512),) * 8, {"softcap": 50.0}),
    "window and softcap": (((3000, 300, 300),) * 4, {"window": 1024, "softcap": 50.0}),
    "heads of 64": (((512, 512, 512),) * 16, {"heads": 14, "kv_heads": 2, "d": 64}),
    "heads of 64, window": (((3000, 300, 300),) * 4, {"heads": 14, "kv_heads": 2, "d": 64, "window": 1024}),
    "deterministic": (((512, 512, 512),) * 8, {"deterministic": True}),
}
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


def _small(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: min(x, 5) if name in ("header", "window") else x for name, x in entries.items()}


def build_cases(quick: bool) -> list[Case]:
    on_gpu = machine.on_gpu()
    pairs = GPU_PAIRS if on_gpu else PAIRS
    shape = dict(zip(("heads", "kv_heads", "d"), GPU_HEADS if on_gpu else HEADS, strict=True))
    shape["dtype"] = "bfloat16" if on_gpu else "float32"
    compared = 1 if on_gpu else None  # comparing all heads of a GPU's cases takes the CPU longer than everything else
    batches = {name: (lengths,) * pairs for name, lengths in SHAPES.items()}
    batches |= {name: draw_lengths(*p, pairs, 0, spread=SPREAD, bounds=BOUNDS) for name, p in PROFILES.items()}
    features = FEATURES if on_gpu else {}
    if quick:
        batches = {"quick": ((20, 9, 14), (3, 5, 2))}
        features = {name: (((20, 9, 14), (3, 1, 1)), _small(entries)) for name, (_, entries) in FEATURES.items()}
    cases = []
    for name, (lengths, entries) in ({name: (x, {}) for name, x in batches.items()} | features).items():
        group = "features" if name in FEATURES else "dataset lengths" if name in PROFILES else "fixed lengths"
        work = AttentionWorkload(lengths, **shape | {"compared": compared} | entries)
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
