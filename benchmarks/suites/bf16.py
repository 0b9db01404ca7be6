"""A DPO step under autocast to bfloat16.

It is small, because a CPU that emulates bfloat16 is slow.
"""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.sides.workload import Workload, draw_lengths
from benchmarks.suites.step import (
    BOUNDS,
    DESCRIPTIONS,
    QUICK_SIZE,
    SPREAD,
    ModelSize,
    case_of,
    profiles,
    sides,
)

PAIRS = 2
SIZE = ModelSize(layers=2, vocabulary=8_000)
NAMES = ("HH",)


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for name, profile in profiles(quick, NAMES).items():
        lengths = draw_lengths(*profile, PAIRS, 0, spread=SPREAD, bounds=BOUNDS)
        work = Workload((lengths,), bf16=True, size=QUICK_SIZE if quick else SIZE)
        cases.append(case_of(name, "all", profile, sides(work)))
    return cases


SUITE = Suite(
    name="bf16",
    title="DPO training step, bfloat16 autocast: 2 pairs, 2 layers, vocabulary 8,000",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS,
)
