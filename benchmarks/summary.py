"""Summary of a run's samples: medians, ratios to fastdpo, geometric means.

It can be recomputed from the samples.
"""

from __future__ import annotations

from typing import Any

from benchmarks import intervals
from benchmarks.cases import SUBJECT
from benchmarks.rates import rates

Record = dict[str, Any]


def samples_by_batch(side: Record) -> list[list[float]]:
    """Seconds, batch by batch.

    Empty for a side without samples: one that is incorrect, failed, out of memory or unavailable.
    """
    samples = side.get("samples", [])
    batches = sorted({sample["batch"] for sample in samples})
    return [[sample["seconds"] for sample in samples if sample["batch"] == batch] for batch in batches]


def peaks(case: Record) -> dict[str, int]:
    """Peak bytes of each measured side over all samples, above the memory held after loading, if that was measured."""
    return {
        name: max(sample["peak_bytes"] for sample in side["samples"])
        for name, side in case["sides"].items()
        if side.get("samples") and "peak_bytes" in side["samples"][0]
    }


def _measured(case: Record, side: str) -> bool:
    return bool(case["sides"].get(side, {}).get("samples"))


def ratios(case: Record) -> dict[str, Record]:
    """The cost of each other measured side divided by the cost of fastdpo."""
    if not _measured(case, SUBJECT):
        return {}
    subject = samples_by_batch(case["sides"][SUBJECT])
    return {
        name: intervals.ratio(samples_by_batch(side), subject)._asdict()
        for name, side in case["sides"].items()
        if name != SUBJECT and _measured(case, name)
    }


def mean_ratio(cases: list[Record], other: str, subject: str = SUBJECT) -> Record | None:
    """Geometric mean over cases of the cost of `other` divided by the cost of `subject`.

    Returns:
        The estimate with `cases`, the number of cases in which both sides were measured, and
        `missing`, the names of the other cases. None if both were measured in no case.
    """
    measured = [case for case in cases if _measured(case, other) and _measured(case, subject)]
    if not measured:
        return None
    pairs = [tuple(samples_by_batch(case["sides"][name]) for name in (other, subject)) for case in measured]
    names = {case["name"] for case in measured}
    missing = [case["name"] for case in cases if case["name"] not in names]
    return intervals.geometric_mean_of_ratios(pairs)._asdict() | {"cases": len(measured), "missing": missing}


def group_means(cases: list[Record]) -> dict[str, Record]:
    """`mean_ratio` of every other side to fastdpo. Sides that were never measured are left out."""
    others = dict.fromkeys(name for case in cases for name in case["sides"] if name != SUBJECT)
    means = {name: mean_ratio(cases, name) for name in others}
    return {name: mean for name, mean in means.items() if mean is not None}


def by_group(cases: list[Record]) -> dict[str, list[Record]]:
    """The cases of each group, in their order."""
    groups: dict[str, list[Record]] = {}
    for case in cases:
        groups.setdefault(case["group"], []).append(case)
    return groups


def summarize(result: Record) -> Record:
    """Per case the medians, peaks, ratios to fastdpo and `rates`; per group the means of the ratios."""
    groups = {group: means for group, cases in by_group(result["cases"]).items() if (means := group_means(cases))}
    return {"cases": {case["name"]: _of_case(result, case) for case in result["cases"]}, "groups": groups}


def _of_case(result: Record, case: Record) -> Record:
    samples = {name: samples_by_batch(side) for name, side in case["sides"].items() if side.get("samples")}
    seconds = {name: intervals.median(of_side)._asdict() for name, of_side in samples.items()}
    values = {name: x["value"] for name, x in seconds.items()}
    of_time = rates(result, case, values, steps=max(map(len, samples.values()), default=1))
    return {"seconds": seconds, "peak_bytes": peaks(case), "times_fastdpo": ratios(case), **of_time}
