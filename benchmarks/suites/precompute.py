"""Precomputing reference log-probs in TRL, at the lengths of three preference datasets."""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.suites.step import DESCRIPTIONS, case_of, profiles, without_and_with, workload

BATCHES = 2  # of 6 pairs


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for name, profile in profiles(quick).items():
        work = workload(profile, quick, batches=BATCHES)
        cases.append(
            case_of(name, "all", profile, without_and_with("benchmarks.sides.precompute:PrecomputeStep", work))
        )
    return cases


SUITE = Suite(
    name="precompute",
    title="Precomputing reference log-probs in TRL, 12 pairs",
    truth="benchmarks.sides.precompute:ExactPrecompute",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS,
)
