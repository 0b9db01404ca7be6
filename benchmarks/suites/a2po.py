"""A step of TRL's `A2POTrainer` without generation, at the lengths of three datasets."""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths
from benchmarks.suites.kto import ROWS
from benchmarks.suites.online import LONGEST
from benchmarks.suites.step import DESCRIPTIONS, QUICK_SIZE, SPREAD, STOCK, case_of, profiles, without_and_with


def build_cases(quick: bool) -> list[Case]:
    cases = []
    size, rows = (QUICK_SIZE, 4) if quick else (ModelSize(), ROWS)
    for name, profile in profiles(quick).items():
        work = Workload((draw_lengths(*profile, rows, 0, spread=SPREAD, bounds=(2, LONGEST)),), size=size)
        sides = without_and_with("benchmarks.sides.a2po:A2POStep", work, STOCK, "stock")
        cases.append(case_of(name, "all", profile, sides))
    return cases


SUITE = Suite(
    name="a2po",
    title="A2PO step in TRL without generation: policy forward and backward, reference forward",
    truth="benchmarks.sides.a2po:ExactA2POStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS
    | {STOCK: "the trainer with its defaults, on given completions. It stores the logits of completions."},
)
