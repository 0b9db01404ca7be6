"""How fastdpo's step grows: a case is an axis, its sides the points on it. Power laws are fitted to the medians."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks import intervals
from benchmarks.cases import Case, Side, Suite
from benchmarks.sides.workload import ModelSize, Workload
from benchmarks.suites.step import QUICK_SIZE
from benchmarks.summary import samples_by_batch

TRAINER = "benchmarks.sides.trainer:TrainerStep"
PAIRS, PROMPT, ANSWER = 4, 192, 96
LINEAR = 1.1
"""The largest exponent that still counts as linear."""

Point = tuple[float, Workload]


def distinct_tokens(work: Workload) -> int:
    """Of the first batch, each prompt once."""
    return sum(map(sum, work.batches[0]))


def uniform(pairs: int, prompt: int, answer: int, size: ModelSize) -> Workload:
    return Workload((((prompt, answer, answer),) * pairs,), size=size)


def axes(quick: bool) -> dict[str, tuple[str, list[Point]]]:
    """name: (what x is, points). Only what the name says differs along an axis, and what follows from it."""
    size, steps = (QUICK_SIZE, 2) if quick else (ModelSize(), 4)
    unit = 8 if quick else 1
    prompt, answer = PROMPT // unit, ANSWER // unit
    together = prompt + 2 * answer
    by_pairs = [uniform(2 << i, prompt, answer, size) for i in range(steps)]
    by_length = [uniform(PAIRS, prompt << i, answer << i, size) for i in range(steps)]
    answers = [together // 16 << i for i in range(steps)][:3] + ([together * 7 // 16] if not quick else [])
    by_scored = [uniform(PAIRS, together - 2 * a, a, size) for a in answers]
    row = prompt + answer
    shares = (0.25, 0.75) if quick else (0.1, 0.3, 0.5, 0.7, 0.9)
    by_share = [uniform(PAIRS, round(row * share), row - round(row * share), size) for share in shares]
    vocabularies = [size.vocabulary // 4 << i for i in range(steps)]
    by_vocabulary = [uniform(PAIRS, prompt, answer, dataclasses.replace(size, vocabulary=v)) for v in vocabularies]
    return {
        "pairs": ("distinct tokens, by more pairs", [(distinct_tokens(x), x) for x in by_pairs]),
        "length": ("distinct tokens, by longer rows", [(distinct_tokens(x), x) for x in by_length]),
        "prompt share": ("distinct tokens, by longer prompts in rows of one length", _by_tokens(by_share)),
        "scored tokens": (
            "scored tokens, among as many tokens",
            [(2 * PAIRS * a, x) for a, x in zip(answers, by_scored, strict=True)],
        ),
        "vocabulary": ("words of the vocabulary", list(zip(vocabularies, by_vocabulary, strict=True))),
    }


def _by_tokens(works: list[Workload]) -> list[Point]:
    return sorted(((distinct_tokens(x), x) for x in works), key=lambda point: point[0])


def cases(quick: bool) -> list[Case]:
    found = []
    for name, (x_name, points) in axes(quick).items():
        sides = tuple(Side(f"{x:,}", TRAINER, work, {"mode": "fastdpo"}) for x, work in points)
        facts = {"x_name": x_name, "x": {f"{x:,}": x for x, _ in points}, "dtype": points[0][1].dtype}
        found.append(Case(name, "scaling", sides, facts))
    return found


def conclude(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The exponent of every axis, and the claim that a step's cost is at most linear in distinct tokens."""
    exponents, claims = {}, []
    for case in found:
        points = [(case["facts"]["x"][name], samples_by_batch(side)) for name, side in case["sides"].items()]
        points = [(x, intervals.median(samples).value) for x, samples in points if samples]
        if len(points) < 2:
            continue
        fit = intervals.exponent(*zip(*points, strict=True))
        exponents[case["name"]] = fit._asdict()
        if case["name"] == "pairs":
            claim = f"time grows with distinct tokens, by more pairs, to a power of at most {LINEAR}"
            claims.append({"claim": claim, "value": fit.value, "unit": "exponent", "holds": fit.value <= LINEAR})
    return {"exponents": exponents, "claims": claims}


SUITE = Suite(
    name="scaling",
    title="How a step with fastdpo grows",
    truth="benchmarks.sides.exact:ExactStep",
    cases=cases,
    rounds=5,
    conclude=conclude,
)
