"""A step of evaluation in TRL's `DPOTrainer`, at the lengths of six preference datasets."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.suites.step import LABELLED, PROFILES, QUICK_PROFILES, REMEMBERED, STOCK, case_of, workload


def cases(quick: bool) -> list[Case]:
    found = []
    for name, profile in (QUICK_PROFILES if quick else PROFILES).items():
        work = workload(profile, quick)
        modes = {STOCK: "stock", LABELLED: "labelled", SUBJECT: "fastdpo", REMEMBERED: "remembered"}
        sides = tuple(
            Side(side, "benchmarks.sides.evaluation:EvaluationStep", work, {"mode": mode})
            for side, mode in modes.items()
        )
        found.append(case_of(name, "all", profile, sides))
    return found


SUITE = Suite(
    name="evaluation",
    title="Evaluating 6 pairs in TRL's trainer: policy forward, reference forward, metrics",
    truth="benchmarks.sides.evaluation:ExactEvaluation",
    cases=cases,
    rounds=3,
)
