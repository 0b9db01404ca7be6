"""A step of TRL's `TPOTrainer`, at the lengths of three datasets."""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths
from benchmarks.suites.online import LONGEST, PAIRS
from benchmarks.suites.step import DESCRIPTIONS, QUICK_SIZE, SPREAD, STOCK, case_of, profiles, without_and_with


def build_cases(quick: bool) -> list[Case]:
    cases = []
    size, pairs = (QUICK_SIZE, 2) if quick else (ModelSize(), PAIRS)
    for name, profile in profiles(quick).items():
        work = Workload((draw_lengths(*profile, pairs, 0, spread=SPREAD, bounds=(2, LONGEST)),), size=size)
        sides = without_and_with("benchmarks.sides.tpo:TPOStep", work, STOCK, "stock")
        cases.append(case_of(name, "all", profile, sides))
    return cases


SUITE = Suite(
    name="tpo",
    title="TPO training step in TRL: policy forward and backward, three completions a prompt",
    truth="benchmarks.sides.tpo:ExactTPOStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS | {STOCK: "the trainer with its defaults. It stores the logits of all positions."},
)
