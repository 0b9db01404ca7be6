"""Attention of one layer, forward and backward: padded, packed, and packed with shared prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.attention import AttentionWorkload
from benchmarks.sides.workload import draw_lengths
from benchmarks.suites.step import BOUNDS, PROFILES, SPREAD
from fastdpo.ops.attention_backends import BACKENDS, TRITON

PADDED, UNSHARED = "padded, torch SDPA", "packed, prompts not shared"
SHAPES = {  # tokens of prompt, chosen and rejected
    "prompt as long as completions": (512, 512, 512),
    "short completions": (380, 35, 35),
    "short rows": (200, 80, 80),
    "long prompts": (3000, 300, 300),
}
PAIRS, GPU_PAIRS = 2, 16
GPU_HEADS, HEADS = (32, 8, 128), (4, 2, 64)  # query heads, key heads, head size
ESTIMATED = 3
"""How many configurations of fastdpo's own kernels are measured on a GPU: the first of the static model's ranking."""


def sides(work: AttentionWorkload, backends: Sequence[str], estimated: int = 0) -> tuple[Side, ...]:
    """Padded attention, and packed attention with the default backend and each of `backends`.

    Also with the first `estimated` configurations of fastdpo's own kernels by the static model.
    """
    packed = "benchmarks.sides.attention:PackedAttention"
    own = dict(shared=True, backend=TRITON)
    return (
        Side(PADDED, "benchmarks.sides.attention:PaddedAttention", work),
        Side(UNSHARED, packed, work, {"shared": False}),
        *(Side(f"{UNSHARED}, {name}", packed, work, {"shared": False, "backend": name}) for name in backends),
        Side(SUBJECT, packed, work, {"shared": True}),
        *(Side(f"{SUBJECT}, {name}", packed, work, {"shared": True, "backend": name}) for name in backends),
        *(Side(f"{SUBJECT}, {TRITON}, estimate {i + 1}", packed, work, own | {"place": i}) for i in range(estimated)),
    )


def build_cases(quick: bool) -> list[Case]:
    on_gpu = torch.cuda.is_available()
    pairs = GPU_PAIRS if on_gpu else PAIRS
    shape = dict(zip(("heads", "kv_heads", "d"), GPU_HEADS if on_gpu else HEADS, strict=True))
    shape["dtype"] = "bfloat16" if on_gpu else "float32"
    batches = {name: (lengths,) * pairs for name, lengths in SHAPES.items()}
    batches |= {name: draw_lengths(*p, pairs, 0, spread=SPREAD, bounds=BOUNDS) for name, p in PROFILES.items()}
    if quick:
        batches = {"quick": ((20, 9, 14), (3, 5, 2))}
    cases = []
    for name, lengths in batches.items():
        group = "dataset lengths" if name in PROFILES else "fixed lengths"
        work = AttentionWorkload(lengths, **shape)
        of_case = sides(work, [*BACKENDS], ESTIMATED) if on_gpu else sides(work, [])
        cases.append(Case(name, group, of_case, {"dtype": shape["dtype"]}))
    return cases


SUITE = Suite(
    name="attention",
    title="Attention of one layer, forward and backward",
    truth="benchmarks.sides.attention:ExactAttention",
    cases=build_cases,
    rounds=7,
    share_process_on_gpu=True,
)
