"""An evaluation step of TRL's `DPOTrainer`, at the lengths of three preference datasets."""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.suites.step import DESCRIPTIONS, case_of, profiles, without_and_with, workload


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for name, profile in profiles(quick).items():
        work = workload(profile, quick)
        cases.append(
            case_of(name, "all", profile, without_and_with("benchmarks.sides.evaluation:EvaluationStep", work))
        )
    return cases


SUITE = Suite(
    name="evaluation",
    title="DPO evaluation step in TRL, 6 pairs: policy forward, reference forward, metrics",
    truth="benchmarks.sides.evaluation:ExactEvaluation",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS,
)
