"""A step of GRPO and RLOO in TRL that accumulates batches, which TRL shuffles, with and without `max_tokens`."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.workload import COMPLETIONS, GroupWorkload, ModelSize, draw_lengths
from benchmarks.suites.online import LONGEST
from benchmarks.suites.step import QUICK_SIZE, SPREAD, case_of, profiles

ACCUMULATION = 4
AS_SHUFFLED = "fastdpo without max_tokens"
DATASETS = ("HH", "TL;DR")


def build_cases(quick: bool) -> list[Case]:
    """Batches of as many rows as a prompt has completions: a step has as many prompts as batches."""
    cases = []
    for trainer in ("GRPO", "RLOO"):
        for name, profile in profiles(quick, DATASETS).items():
            options = dict(spread=SPREAD, bounds=(2, LONGEST), completions=COMPLETIONS)
            lengths = (draw_lengths(*profile, ACCUMULATION, 0, **options),)
            size = QUICK_SIZE if quick else ModelSize()
            work = GroupWorkload(lengths, size=size, trainer=trainer, accumulation=ACCUMULATION)
            sides = tuple(
                Side(side, "benchmarks.sides.groups:GroupStep", work, {"mode": "fastdpo", "cuts": cuts})
                for side, cuts in ((AS_SHUFFLED, False), (SUBJECT, True))
            )
            cases.append(case_of(f"{trainer}/{name}", trainer, profile, sides))
    return cases


SUITE = Suite(
    name="shuffled",
    title="GRPO and RLOO step in TRL without generation that accumulates 4 batches of 8 completions, 8 a prompt",
    truth="benchmarks.sides.groups:ExactGroupStep",
    cases=build_cases,
    rounds=5,
    descriptions={
        AS_SHUFFLED: "fastdpo in the batches of the step, as TRL cuts the completions after it has shuffled them.",
        SUBJECT: "fastdpo with a `max_tokens` of half of the distinct tokens of the step.",
    },
)
