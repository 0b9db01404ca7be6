"""A whole DPO step in TRL's `DPOTrainer`, without the optimizer, at the lengths of six preference datasets."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths

STOCK, LABELLED, FLOOR = "TRL as shipped", "TRL, labelled positions only", "floor"
STOCK_FLASH = "TRL, flash_attention_2"
REMEMBERED, APART = "fastdpo, reference remembered", "fastdpo, prompts not shared"


class Profile(NamedTuple):
    """The median length of a row in tokens, and the ratio of its prompt to its answer."""

    median: float
    ratio: float


PROFILES = {
    "Capybara": Profile(1160, 1.59),
    "HH": Profile(186, 2.15),
    "MetaMath": Profile(872, 3.91),
    "TL;DR": Profile(416, 11.14),
    "HelpSteer": Profile(775, 6.34),
    "UltraFeedback": Profile(409, 0.42),
}
SPREAD = 0.6
BOUNDS = 2, 1536  # tokens of a part
PAIRS = 6

GPU_MODELS = {  # a size, whether under LoRA, whether with gradient checkpointing
    "0.5B, full": (ModelSize(24, 896, 4864, 14, 2, 151_936), False, False),  # of Qwen2.5
    "8B, LoRA": (ModelSize(36, 4096, 12_288, 32, 8, 151_936), True, True),  # of Qwen3
}
QUICK_SIZE = ModelSize(layers=2, hidden=32, mlp=48, heads=4, kv_heads=2, vocabulary=500)
QUICK_PROFILES = {"HH": Profile(40, 2.15)}


def workload(profile: Profile, quick: bool, lora: bool = False, batches: int = 1) -> Workload:
    pairs, batches, size = (2, 2, QUICK_SIZE) if quick else (PAIRS, batches, ModelSize())
    lengths = [draw_lengths(*profile, pairs, seed, spread=SPREAD, bounds=BOUNDS) for seed in range(batches)]
    return Workload(tuple(lengths), lora=lora, size=size)


def case_of(name: str, group: str, profile: Profile, sides: tuple[Side, ...]) -> Case:
    facts = {"dtype": sides[0].workload.dtype, "median": profile.median, "ratio": profile.ratio}
    return Case(name, group, sides, facts)


def sides(work: Workload) -> tuple[Side, ...]:
    trainer = "benchmarks.sides.trainer:TrainerStep"
    return (
        Side(STOCK, trainer, work, {"mode": "stock"}),
        Side(LABELLED, trainer, work, {"mode": "labelled"}),
        Side(SUBJECT, trainer, work, {"mode": "fastdpo"}),
        Side(REMEMBERED, trainer, work, {"mode": "remembered"}),
        Side(FLOOR, "benchmarks.sides.floor:FloorStep", work, compared=False),
    )


def sides_on_gpu(work: Workload) -> tuple[Side, ...]:
    trainer = "benchmarks.sides.trainer:TrainerStep"
    return (
        Side(STOCK, trainer, work, {"mode": "stock"}),
        Side(STOCK_FLASH, trainer, work, {"mode": "stock", "attention": "flash_attention_2"}),
        Side(APART, trainer, work, {"mode": "fastdpo", "share_prompts": False}),
        Side(SUBJECT, trainer, work, {"mode": "fastdpo"}),
        Side(REMEMBERED, trainer, work, {"mode": "remembered"}),
    )


def cases_on_gpu(quick: bool) -> list[Case]:
    found = []
    for group, (size, lora, checkpointing) in GPU_MODELS.items():
        options = {"lora": lora, "checkpointing": checkpointing, "bf16": True, "weights": "bfloat16"}
        for name, profile in (QUICK_PROFILES if quick else PROFILES).items():
            work = replace(workload(profile, quick), **options, size=QUICK_SIZE if quick else size)
            found.append(case_of(f"{group}/{name}", group, profile, sides_on_gpu(work)))
    return found


def cases(quick: bool) -> list[Case]:
    if torch.cuda.is_available():
        return cases_on_gpu(quick)
    return [
        case_of(f"{group}/{name}", group, profile, sides(workload(profile, quick, lora)))
        for group, lora in (("full", False), ("LoRA", True))
        for name, profile in (QUICK_PROFILES if quick else PROFILES).items()
    ]


SUITE = Suite(
    name="step",
    title="One DPO step in TRL's trainer: policy forward and backward, reference forward",
    truth="benchmarks.sides.exact:ExactStep",
    cases=cases,
    rounds=3,
)
