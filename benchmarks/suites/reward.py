"""A training step of TRL's `RewardTrainer`, at the lengths of six preference datasets."""

from __future__ import annotations

from benchmarks.cases import Case, Side, Suite
from benchmarks.machine import on_gpu
from benchmarks.suites.step import (
    DESCRIPTIONS,
    FLOOR,
    PROFILES,
    STOCK,
    case_of,
    one_gpu_case,
    profiles,
    without_and_with,
    workload,
)

STEP = "benchmarks.sides.reward:RewardStep"


def build_cases(quick: bool) -> list[Case]:
    if on_gpu():
        return [one_gpu_case(STEP, quick)]
    cases = []
    for name, profile in profiles(quick, PROFILES).items():
        work = workload(profile, quick)
        floor = Side(FLOOR, "benchmarks.sides.reward:RewardFloorStep", work, compared=False)
        cases.append(case_of(name, "all", profile, (*without_and_with(STEP, work, STOCK, "stock"), floor)))
    return cases


SUITE = Suite(
    name="reward",
    title="Reward model training step in TRL: forward and backward",
    truth="benchmarks.sides.reward:ExactRewardStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS
    | {
        STOCK: "the trainer with its defaults, except that gradient checkpointing is off, on every side.",
        FLOOR: "the model's own layers on the distinct tokens and the label of each row's last token, without loss or "
        "trainer (`benchmarks/sides/reward.py`). Its numbers have no meaning and are not compared.",
    },
)
