"""A step of TRL's `GRPOTrainer` and `RLOOTrainer` without generation, at the lengths of three datasets."""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.sides.workload import COMPLETIONS, GroupWorkload, ModelSize, draw_lengths
from benchmarks.suites.step import DESCRIPTIONS, LONGEST_STORED, QUICK_SIZE, SPREAD, case_of, profiles, without_and_with

PROMPTS, BATCHES = 2, 2


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for trainer in ("GRPO", "RLOO"):
        for name, profile in profiles(quick).items():
            options = dict(spread=SPREAD, bounds=(2, LONGEST_STORED), completions=COMPLETIONS)
            lengths = tuple(draw_lengths(*profile, PROMPTS, seed, **options) for seed in range(BATCHES))
            work = GroupWorkload(lengths, size=QUICK_SIZE if quick else ModelSize(), trainer=trainer)
            sides = without_and_with("benchmarks.sides.groups:GroupStep", work)
            cases.append(case_of(f"{trainer}/{name}", trainer, profile, sides))
    return cases


SUITE = Suite(
    name="grpo",
    title="GRPO and RLOO step in TRL without generation, 8 completions a prompt: "
    "policy forward and backward, reference forward, in RLOO also old policy forward",
    truth="benchmarks.sides.groups:ExactGroupStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS,
)
