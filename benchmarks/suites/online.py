"""A step of TRL's `OnlineDPOTrainer` without generation, at the lengths of three datasets."""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.machine import on_gpu
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths
from benchmarks.suites.step import (
    DESCRIPTIONS,
    QUICK_SIZE,
    SPREAD,
    STOCK,
    case_of,
    one_gpu_case,
    profiles,
    without_and_with,
)

PAIRS, BATCHES, LONGEST = 4, 2, 768
STEP = "benchmarks.sides.online:OnlineStep"


def build_cases(quick: bool) -> list[Case]:
    if on_gpu():
        return [one_gpu_case(STEP, quick)]
    cases = []
    size, pairs = (QUICK_SIZE, 2) if quick else (ModelSize(), PAIRS)
    for name, profile in profiles(quick).items():
        lengths = [draw_lengths(*profile, pairs, seed, spread=SPREAD, bounds=(2, LONGEST)) for seed in range(BATCHES)]
        work = Workload(tuple(lengths), size=size)
        cases.append(case_of(name, "all", profile, without_and_with(STEP, work, STOCK, "stock")))
    return cases


SUITE = Suite(
    name="online",
    title="Online DPO training step in TRL without generation: policy forward and backward, reference forward",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS
    | {
        STOCK: "the trainer with its defaults, on given completions and without gradient checkpointing. "
        "It stores the logits of all positions of the completions and their log-softmax."
    },
)
