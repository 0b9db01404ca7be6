"""A training step of TRL's `DPOTrainer` on turns of conversations, as drawn and with `group_prompts`."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.conversations import in_order
from benchmarks.sides.workload import ModelSize, Workload
from benchmarks.suites.step import QUICK_SIZE, TRAINER

AS_DRAWN = "fastdpo without group_prompts"
CONVERSATIONS, PAIRS = 12, 4
LONGEST = 8192


def build_cases(quick: bool) -> list[Case]:
    """All batches of an epoch. So few conversations meet in a batch by chance more often than those of a dataset do."""
    base = Workload((), size=QUICK_SIZE if quick else ModelSize(), max_length=LONGEST)
    scale = 0.05 if quick else 1.0
    sides = tuple(
        Side(
            name,
            TRAINER,
            in_order(base, CONVERSATIONS, PAIRS, grouped=grouped, scale=scale),
            {"mode": "fastdpo"},
        )
        for name, grouped in ((AS_DRAWN, False), (SUBJECT, True))
    )
    pairs = sum(map(len, sides[0].workload.batches))
    return [Case(f"{pairs} turns", "", sides, {"dtype": base.dtype})]


SUITE = Suite(
    name="conversations",
    title="DPO training step in TRL on turns of conversations, mean of an epoch",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=3,
    descriptions={
        AS_DRAWN: "fastdpo in batches of 4 turns, as TRL draws them.",
        SUBJECT: "fastdpo in the batches of an epoch that `group_prompts=True` has reordered.",
    },
)
