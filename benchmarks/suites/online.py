"""A step of TRL's `OnlineDPOTrainer` without its generation and optimizer, at the lengths of preference datasets."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.workload import Workload, draw_lengths
from benchmarks.suites.step import PROFILES, QUICK_PROFILES, QUICK_SIZE, SPREAD, STOCK, ModelSize, case_of

SHORT = ("HH", "TL;DR", "UltraFeedback")
"""Profiles whose rows stock can hold the logits of, several times over."""
PAIRS, BATCHES, LONGEST = 4, 2, 768


def cases(quick: bool) -> list[Case]:
    found = []
    size, pairs = (QUICK_SIZE, 2) if quick else (ModelSize(), PAIRS)
    for name, profile in (QUICK_PROFILES if quick else {name: PROFILES[name] for name in SHORT}).items():
        lengths = [draw_lengths(*profile, pairs, seed, spread=SPREAD, bounds=(2, LONGEST)) for seed in range(BATCHES)]
        work = Workload(tuple(lengths), size=size)
        sides = tuple(
            Side(side, "benchmarks.sides.online:OnlineStep", work, {"mode": mode})
            for side, mode in ((STOCK, "stock"), (SUBJECT, "fastdpo"))
        )
        found.append(case_of(name, "all", profile, sides))
    return found


SUITE = Suite(
    name="online",
    title="One step of TRL's OnlineDPOTrainer without generation: policy forward and backward, reference forward",
    truth="benchmarks.sides.exact:ExactStep",
    cases=cases,
    rounds=3,
)
