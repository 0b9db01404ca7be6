"""A step with gradient checkpointing, whose activations fastdpo keeps where there is room, by the processor's time."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.suites.accumulated import SIZE
from benchmarks.suites.step import QUICK_SIZE, case_of, profiles, workload

RECOMPUTED = "fastdpo, all layers recomputed"
SIDE = "benchmarks.sides.kept:KeptStep"


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for group, lora in (("full", False), ("LoRA", True)):
        for name, profile in profiles(quick).items():
            work = replace(workload(profile, quick, lora=lora, checkpointing=True), size=QUICK_SIZE if quick else SIZE)
            sides = Side(RECOMPUTED, SIDE, work, {"keeps": False}), Side(SUBJECT, SIDE, work, {"keeps": True})
            cases.append(case_of(f"{group}/{name}", group, profile, sides))
    return cases


SUITE = Suite(
    name="kept",
    title="DPO training step in TRL with gradient checkpointing",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=9,
    descriptions={
        RECOMPUTED: "with `FASTDPO_AUTO=0`.",
        SUBJECT: "with `FASTDPO_AUTO=1`, when it has measured the layers. Seconds are those of the processor.",
    },
)
