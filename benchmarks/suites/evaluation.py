"""An evaluation step of TRL's `DPOTrainer`, at the lengths of three preference datasets."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.suites.step import DESCRIPTIONS, LABELLED, case_of, profiles, workload


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for name, profile in profiles(quick).items():
        work = workload(profile, quick)
        modes = {LABELLED: "labelled", SUBJECT: "fastdpo"}
        sides = tuple(
            Side(side, "benchmarks.sides.evaluation:EvaluationStep", work, {"mode": mode})
            for side, mode in modes.items()
        )
        cases.append(case_of(name, "all", profile, sides))
    return cases


SUITE = Suite(
    name="evaluation",
    title="DPO evaluation step in TRL, 6 pairs: policy forward, reference forward, metrics",
    truth="benchmarks.sides.evaluation:ExactEvaluation",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS,
)
