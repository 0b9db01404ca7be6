"""A training step of TRL's `DPOTrainer` where more than the prompt of a pair can be shared, or where dropout is drawn.

Batches with several pairs of each prompt, and LoRA with TRL's default dropout. Steps with dropout are
checked without it, since they are random.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.cases import Case, Side, Suite
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths
from benchmarks.suites.step import (
    BOUNDS,
    DESCRIPTIONS,
    QUICK_SIZE,
    SPREAD,
    LengthProfile,
    case_of,
    profiles,
    sides,
    workload,
)

PAIRS_ONLY = "fastdpo, prompts shared by pairs only"
DETERMINISTIC = "fastdpo, prompts not shared under dropout"
PAIRS_OF_PROMPT, PAIRS = (2, 4), 8
LORA_DROPOUT = 0.05


def workload_of_prompts(profile: LengthProfile, quick: bool, pairs_of_prompt: int) -> Workload:
    """A batch with several pairs of each prompt, whose completions all have their own lengths."""
    pairs, size = (4, QUICK_SIZE) if quick else (PAIRS, ModelSize())
    completions = 2 * pairs_of_prompt
    options = {"spread": SPREAD, "bounds": BOUNDS, "completions": completions}
    prompts = draw_lengths(*profile, pairs // pairs_of_prompt, 0, **options)
    batch = tuple((p, *answers[i : i + 2]) for p, *answers in prompts for i in range(0, completions, 2))
    return Workload((batch,), size=size, pairs_of_prompt=pairs_of_prompt)


def sides_of(work: Workload, less: str, options: dict[str, str]) -> tuple[Side, ...]:
    """TRL, fastdpo, and fastdpo with options that make it share less."""
    labelled, subject, *_ = sides(work)
    return labelled, Side(less, subject.build, work, subject.options | options), subject


def build_cases(quick: bool) -> list[Case]:
    cases = []
    for count in PAIRS_OF_PROMPT:
        group = f"{count} pairs of a prompt"
        for name, profile in profiles(quick).items():
            compared = sides_of(workload_of_prompts(profile, quick, count), PAIRS_ONLY, {"groups": "pairs"})
            cases.append(case_of(f"{group}/{name}", group, profile, compared))
    group = f"LoRA, dropout {LORA_DROPOUT}"
    for name, profile in profiles(quick).items():
        work = replace(workload(profile, quick, lora=True), lora_dropout=LORA_DROPOUT)
        compared = sides_of(work, DETERMINISTIC, {"share_prompts": "deterministic"})
        cases.append(case_of(f"{group}/{name}", group, profile, compared))
    return cases


SUITE = Suite(
    name="sharing",
    title="DPO training step in TRL with several pairs of a prompt, or with dropout",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS
    | {
        PAIRS_ONLY: "fastdpo restricted to the prompts that the two rows of a pair share.",
        DETERMINISTIC: 'with `share_prompts="deterministic"`, which shares no prompts while dropout is active.',
    },
)
