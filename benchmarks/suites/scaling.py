"""Time of a step with fastdpo by size.

A case is an axis, its sides are points on it; a power law is fitted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks import intervals
from benchmarks.cases import Case, Side, Suite
from benchmarks.sides.workload import ModelSize, Workload
from benchmarks.suites.step import QUICK_SIZE, TRAINER
from benchmarks.summary import samples_by_batch

PAIRS, PROMPT, COMPLETION = 4, 192, 96
LINEAR = 1.1
"""The largest exponent that counts as linear."""

Point = tuple[float, Workload]


def distinct_tokens(work: Workload) -> int:
    """Number of distinct tokens of the first batch: each prompt counts once."""
    return sum(map(sum, work.batches[0]))


def uniform(pairs: int, prompt: int, completion: int, size: ModelSize) -> Workload:
    """One batch of pairs of equal lengths."""
    return Workload((((prompt, completion, completion),) * pairs,), size=size)


def axes(quick: bool) -> dict[str, tuple[str, list[Point]]]:
    """Maps the name of each axis to the label of x and the points.

    Only the named quantity varies along an axis.
    """
    size, steps = (QUICK_SIZE, 2) if quick else (ModelSize(), 4)
    unit = 8 if quick else 1
    prompt, completion = PROMPT // unit, COMPLETION // unit
    distinct = prompt + 2 * completion
    by_pairs = [uniform(2 << i, prompt, completion, size) for i in range(steps)]
    by_length = [uniform(PAIRS, prompt << i, completion << i, size) for i in range(steps)]
    completions = [distinct // 16 << i for i in range(steps)][:3] + ([distinct * 7 // 16] if not quick else [])
    by_scored = [uniform(PAIRS, distinct - 2 * c, c, size) for c in completions]
    row = prompt + completion
    shares = (0.25, 0.75) if quick else (0.1, 0.3, 0.5, 0.7, 0.9)
    by_share = [uniform(PAIRS, round(row * share), row - round(row * share), size) for share in shares]
    vocabularies = [size.vocabulary // 4 << i for i in range(steps)]
    by_vocabulary = [uniform(PAIRS, prompt, completion, dataclasses.replace(size, vocabulary=v)) for v in vocabularies]
    return {
        "pairs": ("distinct tokens, more pairs", [(distinct_tokens(x), x) for x in by_pairs]),
        "length": ("distinct tokens, longer rows", [(distinct_tokens(x), x) for x in by_length]),
        "prompt share": ("distinct tokens, longer prompts in rows of equal length", _sorted_by_tokens(by_share)),
        "scored tokens": (
            "scored tokens, equal number of tokens",
            [(2 * PAIRS * c, x) for c, x in zip(completions, by_scored, strict=True)],
        ),
        "vocabulary": ("vocabulary size", list(zip(vocabularies, by_vocabulary, strict=True))),
    }


def _sorted_by_tokens(works: list[Workload]) -> list[Point]:
    return sorted(((distinct_tokens(x), x) for x in works), key=lambda point: point[0])


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for name, (x_name, points) in axes(quick).items():
        sides = tuple(Side(f"{x:,}", TRAINER, work, {"mode": "fastdpo"}) for x, work in points)
        facts = {"x_name": x_name, "x": {f"{x:,}": x for x, _ in points}, "dtype": points[0][1].dtype}
        cases.append(Case(name, "scaling", sides, facts))
    return cases


def exponents_and_claims(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The exponent of every axis, and the claim that time is at most linear in distinct tokens."""
    exponents, claims = {}, []
    for case in cases:
        points = [(case["facts"]["x"][name], samples_by_batch(side)) for name, side in case["sides"].items()]
        points = [(x, intervals.median(samples).value) for x, samples in points if samples]
        if len(points) < 2:
            continue
        fit = intervals.exponent(*zip(*points, strict=True))
        exponents[case["name"]] = fit._asdict()
        if case["name"] == "pairs":
            claim = f"the exponent of time in distinct tokens (more pairs) is at most {LINEAR}"
            claims.append({"claim": claim, "value": fit.value, "unit": "exponent", "holds": fit.value <= LINEAR})
    return {"exponents": exponents, "claims": claims}


SUITE = Suite(
    name="scaling",
    title="Time of a DPO training step with fastdpo, by size",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=3,
    extra_summary=exponents_and_claims,
)
