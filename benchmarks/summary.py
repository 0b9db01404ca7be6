"""What is drawn from the samples of a run, and can be drawn again: medians, ratios to fastdpo, geometric means."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks import intervals
from benchmarks.cases import SUBJECT, Suite
from benchmarks.intervals import Batches

Record = dict[str, Any]


class Reading(NamedTuple):
    """The peak memory of a side over all of its samples, above what it held when it was loaded."""

    side: str
    options: dict[str, Any]
    bytes: int


def samples_by_batch(side: Record) -> list[list[float]]:
    """Seconds; empty for a side without samples, which is one that is not equal, failed or can't run here."""
    samples = side.get("samples", [])
    batches = sorted({sample["batch"] for sample in samples})
    return [[sample["seconds"] for sample in samples if sample["batch"] == batch] for batch in batches]


def peaks(case: Record) -> list[Reading]:
    return [
        Reading(name, side["options"], max(sample["peak_bytes"] for sample in side["samples"]))
        for name, side in case["sides"].items()
        if side.get("samples")
    ]


def _ratios(case: Record) -> dict[str, tuple[Batches, Batches]]:
    """Of every other side that was measured: its samples and those of fastdpo."""
    measured = {name: samples_by_batch(side) for name, side in case["sides"].items() if side.get("samples")}
    subject = measured.pop(SUBJECT, None)
    return {} if subject is None else {name: (other, subject) for name, other in measured.items()}


def mean_over(cases: list[Record], other: str, subject: str) -> dict[str, Any] | None:
    """How many times the subject's cost the other's is, in the geometric mean of cases; None if one is nowhere."""
    measured = [case["sides"] for case in cases]
    if not measured or not all(x.get(name, {}).get("samples") for x in measured for name in (other, subject)):
        return None
    pairs = [tuple(samples_by_batch(x[name]) for name in (other, subject)) for x in measured]
    return intervals.geometric_mean_of_ratios(pairs)._asdict()


def summarize(suite: Suite, cases: list[Record]) -> Record:
    """`cases`: medians in seconds, peaks in bytes, ratios of others to fastdpo; `groups`: their geometric means."""
    of_cases, groups = {}, {}
    for case in cases:
        pairs = _ratios(case)
        of_cases[case["name"]] = {
            "seconds": {
                name: intervals.median(samples_by_batch(side))._asdict()
                for name, side in case["sides"].items()
                if side.get("samples")
            },
            "peak_bytes": {reading.side: reading.bytes for reading in peaks(case)},
            "times_fastdpo": {name: intervals.ratio(*pair)._asdict() for name, pair in pairs.items()},
        }
        for name, pair in pairs.items():
            groups.setdefault(case["group"], {}).setdefault(name, []).append(pair)
    of_groups = {
        group: {
            name: intervals.geometric_mean_of_ratios(pairs)._asdict() | {"cases": len(pairs)}
            for name, pairs in others.items()
        }
        for group, others in groups.items()
    }
    return {"cases": of_cases, "groups": of_groups} | suite.conclude(cases)
