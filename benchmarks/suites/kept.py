"""A step of TRL's own script: 2 pairs 8 times with gradient checkpointing, by what memory is spent on."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.workload import AccumulatedWorkload, draw_lengths
from benchmarks.suites.accumulated import ACCUMULATIONS, ROWS, SIZE
from benchmarks.suites.step import BOUNDS, DESCRIPTIONS, LABELLED, QUICK_SIZE, SPREAD, case_of, profiles

SIDE = "benchmarks.sides.accumulated:CheckpointedDPO"
RECOMPUTED, KEPT, OWN = (f"fastdpo, {x}" for x in ("nothing spent", "kept activations", "own micro-batches"))
OPTIONS: dict[str, dict[str, Any]] = {
    LABELLED: {"mode": "labelled"},
    RECOMPUTED: {"mode": "fastdpo"},
    KEPT: {"mode": "fastdpo", "auto": "1"},
    OWN: {"mode": "fastdpo", "max_tokens": "own"},
    SUBJECT: {"mode": "fastdpo", "auto": "1", "max_tokens": "own"},
}
"""Those of each side."""
STEPS = 2


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for group, lora in (("full", False), ("LoRA", True)):
        for name, profile in profiles(quick).items():
            steps = tuple(draw_lengths(*profile, ROWS, seed, spread=SPREAD, bounds=BOUNDS) for seed in range(STEPS))
            size, accumulation = QUICK_SIZE if quick else SIZE, ACCUMULATIONS["2 x 8"]
            work = AccumulatedWorkload(steps, lora=lora, checkpointing=True, size=size, accumulation=accumulation)
            sides = tuple(Side(side, SIDE, work, options) for side, options in OPTIONS.items())
            cases.append(case_of(f"{group}/{name}", group, profile, sides))
    return cases


SUITE = Suite(
    name="kept",
    title="DPO training step in TRL that accumulates 16 pairs in batches of 2, with gradient checkpointing",
    truth="benchmarks.sides.accumulated:ExactAccumulated",
    cases=build_cases,
    rounds=5,
    descriptions={
        LABELLED: DESCRIPTIONS[LABELLED],
        RECOMPUTED: "with `FASTDPO_AUTO=0` and `max_tokens=None`: the trainer's batches, with all layers recomputed.",
        KEPT: "with `FASTDPO_AUTO=1`, which keeps activations on a CPU as well, when it has measured the layers.",
        OWN: 'with `max_tokens="own"`, when it has measured a step.',
        SUBJECT: "with both. The steps have no optimizer, and their seconds are those of the processor.",
    },
)
