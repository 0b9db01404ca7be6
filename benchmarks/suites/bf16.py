"""A DPO step under autocast to bfloat16. Small: where a CPU emulates it, products take some 50 times as long."""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.sides.workload import Workload, draw_lengths
from benchmarks.suites.step import BOUNDS, PROFILES, QUICK_PROFILES, QUICK_SIZE, SPREAD, ModelSize, case_of, sides

PAIRS = 2
SIZE = ModelSize(layers=2, vocabulary=8_000)
NAMES = ("HH",)


def cases(quick: bool) -> list[Case]:
    profiles = QUICK_PROFILES if quick else {name: PROFILES[name] for name in NAMES}
    found = []
    for name, profile in profiles.items():
        lengths = draw_lengths(*profile, PAIRS, 0, spread=SPREAD, bounds=BOUNDS)
        work = Workload((lengths,), bf16=True, size=QUICK_SIZE if quick else SIZE)
        found.append(case_of(name, "all", profile, sides(work)))
    return found


SUITE = Suite(
    name="bf16",
    title="One DPO step under autocast to bfloat16: 2 pairs, 2 layers, V 8,000",
    truth="benchmarks.sides.exact:ExactStep",
    cases=cases,
    rounds=3,
)
