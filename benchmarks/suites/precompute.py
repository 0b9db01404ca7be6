"""Reference log-probabilities of a data set, at the lengths of six preference datasets."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.suites.step import LABELLED, PROFILES, QUICK_PROFILES, STOCK, case_of, workload

BATCHES = 2  # of 6 pairs


def cases(quick: bool) -> list[Case]:
    found = []
    for name, profile in (QUICK_PROFILES if quick else PROFILES).items():
        work = workload(profile, quick, batches=BATCHES)
        sides = tuple(
            Side(side, "benchmarks.sides.precompute:Precompute", work, {"mode": mode})
            for side, mode in ((STOCK, "stock"), (LABELLED, "labelled"), (SUBJECT, "fastdpo"))
        )
        found.append(case_of(name, "all", profile, sides))
    return found


SUITE = Suite(
    name="precompute",
    title="Reference log-probabilities of 12 pairs, by TRL's precompute_ref_log_probs",
    truth="benchmarks.sides.precompute:ExactPass",
    cases=cases,
    rounds=3,
)
