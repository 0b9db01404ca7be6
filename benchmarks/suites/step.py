"""A training step of TRL's `DPOTrainer` without the optimizer, at the lengths of six datasets.

Hybrid models, and batches with several pairs of each prompt, run at the lengths of three of them.
Steps with dropout are checked without it, since they are random.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths

STOCK, LABELLED, FLOOR = "TRL as shipped", "TRL, labelled positions only", "floor"
STOCK_FLASH = "TRL, flash_attention_2"
CACHED_REFERENCE, UNSHARED = "fastdpo, cached reference", "fastdpo, prompts not shared"
BUDGET = "fastdpo, half the tokens at a time"
PAIRS_ONLY = "fastdpo, prompts shared by pairs only"
DETERMINISTIC = "fastdpo, prompts not shared under dropout"


class LengthProfile(NamedTuple):
    """Median length of a row in tokens, and ratio of prompt to completion length."""

    median: float
    ratio: float


PROFILES = {
    "Capybara": LengthProfile(1160, 1.59),
    "HH": LengthProfile(186, 2.15),
    "MetaMath": LengthProfile(872, 3.91),
    "TL;DR": LengthProfile(416, 11.14),
    "HelpSteer": LengthProfile(775, 6.34),
    "UltraFeedback": LengthProfile(409, 0.42),
}
HYBRID = {"Qwen3.5": "gated delta rule", "Falcon-H1": "Mamba 2 and attention", "LFM2": "gated convolutions"}
HYBRID_PROFILES = {name: PROFILES[name] for name in ("HH", "TL;DR", "UltraFeedback")}
SEVERAL_PROFILES = {name: PROFILES[name] for name in ("TL;DR", "HelpSteer", "UltraFeedback")}
SPREAD = 0.6  # standard deviation of the logarithm of a length
BOUNDS = 2, 1536  # tokens of a prompt or completion
PAIRS = 6
PAIRS_OF_PROMPT, PAIRS_WITH_SEVERAL = (2, 4), 8
LORA_DROPOUT = 0.05

GPU_MODELS = {  # size, LoRA, gradient checkpointing
    "0.5B, full": (ModelSize(24, 896, 4864, 14, 2, 151_936), False, False),  # Qwen2.5
    "8B, LoRA": (ModelSize(36, 4096, 12_288, 32, 8, 151_936), True, True),  # Qwen3
}
QUICK_SIZE = ModelSize(layers=2, hidden=32, mlp=48, heads=4, kv_heads=2, vocabulary=500)
QUICK_PROFILES = {"HH": LengthProfile(40, 2.15)}


def workload(profile: LengthProfile, quick: bool, lora: bool = False, batches: int = 1) -> Workload:
    pairs, batches, size = (2, 2, QUICK_SIZE) if quick else (PAIRS, batches, ModelSize())
    lengths = [draw_lengths(*profile, pairs, seed, spread=SPREAD, bounds=BOUNDS) for seed in range(batches)]
    return Workload(tuple(lengths), lora=lora, size=size)


def workload_of_prompts(profile: LengthProfile, quick: bool, pairs_of_prompt: int) -> Workload:
    """A batch with several pairs of each prompt, whose completions all have their own lengths."""
    pairs, size = (4, QUICK_SIZE) if quick else (PAIRS_WITH_SEVERAL, ModelSize())
    completions = 2 * pairs_of_prompt
    options = {"spread": SPREAD, "bounds": BOUNDS, "completions": completions}
    prompts = draw_lengths(*profile, pairs // pairs_of_prompt, 0, **options)
    batch = tuple((p, *answers[i : i + 2]) for p, *answers in prompts for i in range(0, completions, 2))
    return Workload((batch,), size=size, pairs_of_prompt=pairs_of_prompt)


def case_of(name: str, group: str, profile: LengthProfile, sides: tuple[Side, ...]) -> Case:
    facts = {"dtype": sides[0].workload.dtype, "median": profile.median, "ratio": profile.ratio}
    return Case(name, group, sides, facts)


def sides(work: Workload) -> tuple[Side, ...]:
    trainer = "benchmarks.sides.trainer:TrainerStep"
    return (
        Side(STOCK, trainer, work, {"mode": "stock"}),
        Side(LABELLED, trainer, work, {"mode": "labelled"}),
        Side(SUBJECT, trainer, work, {"mode": "fastdpo"}),
        Side(CACHED_REFERENCE, trainer, work, {"mode": "cached"}),
        Side(BUDGET, "benchmarks.sides.budget:BudgetStep", work),
        Side(FLOOR, "benchmarks.sides.floor:FloorStep", work, compared=False),
    )


def sides_of_hybrid(work: Workload) -> tuple[Side, ...]:
    return sides(work)[:3]  # the floor runs attention only


def sides_of_sharing(work: Workload, less: str, options: dict[str, str]) -> tuple[Side, ...]:
    """TRL, fastdpo, and fastdpo with options that make it share less."""
    stock, labelled, subject, *_ = sides(work)
    return stock, labelled, Side(less, subject.build, work, subject.options | options), subject


def sides_on_gpu(work: Workload) -> tuple[Side, ...]:
    trainer = "benchmarks.sides.trainer:TrainerStep"
    return (
        Side(STOCK, trainer, work, {"mode": "stock"}),
        Side(STOCK_FLASH, trainer, work, {"mode": "stock", "attention": "flash_attention_2"}),
        Side(UNSHARED, trainer, work, {"mode": "fastdpo", "share_prompts": False}),
        Side(SUBJECT, trainer, work, {"mode": "fastdpo"}),
        Side(CACHED_REFERENCE, trainer, work, {"mode": "cached"}),
    )


def build_gpu_cases(quick: bool) -> list[Case]:
    cases = []
    for group, (size, lora, checkpointing) in GPU_MODELS.items():
        options = {"lora": lora, "checkpointing": checkpointing, "bf16": True, "weights": "bfloat16"}
        for name, profile in (QUICK_PROFILES if quick else PROFILES).items():
            work = replace(workload(profile, quick), **options, size=QUICK_SIZE if quick else size)
            cases.append(case_of(f"{group}/{name}", group, profile, sides_on_gpu(work)))
    return cases


def build_cases(quick: bool) -> list[Case]:
    if torch.cuda.is_available():
        return build_gpu_cases(quick)
    cases = [
        case_of(f"{group}/{name}", group, profile, sides(workload(profile, quick, lora)))
        for group, lora in (("full", False), ("LoRA", True))
        for name, profile in (QUICK_PROFILES if quick else PROFILES).items()
    ]
    for architecture in HYBRID:
        for name, profile in (QUICK_PROFILES if quick else HYBRID_PROFILES).items():
            work = replace(workload(profile, quick), architecture=architecture)
            cases.append(case_of(f"{architecture}/{name}", architecture, profile, sides_of_hybrid(work)))
    for count in PAIRS_OF_PROMPT:
        for name, profile in (QUICK_PROFILES if quick else SEVERAL_PROFILES).items():
            compared = sides_of_sharing(workload_of_prompts(profile, quick, count), PAIRS_ONLY, {"groups": "pairs"})
            group = f"{count} pairs of a prompt"
            cases.append(case_of(f"{group}/{name}", group, profile, compared))
    for name, profile in (QUICK_PROFILES if quick else PROFILES).items():
        work = replace(workload(profile, quick, lora=True), lora_dropout=LORA_DROPOUT)
        compared = sides_of_sharing(work, DETERMINISTIC, {"share_prompts": "deterministic"})
        group = f"LoRA, dropout {LORA_DROPOUT}"
        cases.append(case_of(f"{group}/{name}", group, profile, compared))
    return cases


SUITE = Suite(
    name="step",
    title="DPO training step in TRL: policy forward and backward, reference forward",
    truth="benchmarks.sides.exact:ExactStep",
    cases=build_cases,
    rounds=3,
)
