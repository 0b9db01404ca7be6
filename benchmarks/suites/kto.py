"""A step of TRL's `KTOTrainer`, at the lengths of three datasets."""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths
from benchmarks.suites.step import BOUNDS, DESCRIPTIONS, QUICK_SIZE, SPREAD, case_of, profiles, without_and_with

ROWS = 8  # each with a prompt of its own, as in a shuffled dataset


def build_cases(quick: bool) -> list[Case]:
    cases = []
    size, rows = (QUICK_SIZE, 4) if quick else (ModelSize(), ROWS)
    for name, profile in profiles(quick).items():
        work = Workload((draw_lengths(*profile, rows, 0, spread=SPREAD, bounds=BOUNDS),), size=size)
        cases.append(case_of(name, "all", profile, without_and_with("benchmarks.sides.kto:KTOStep", work)))
    return cases


SUITE = Suite(
    name="kto",
    title="KTO training step in TRL: policy forward and backward, its KL pass, both passes of the reference",
    truth="benchmarks.sides.kto:ExactKTOStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS,
)
