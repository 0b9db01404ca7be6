"""A step of TRL's `DPOTrainer` on pairs with images, for four families of small models.

With LoRA on the language model, policy and reference have the same image tower.
"""

from __future__ import annotations

from benchmarks.cases import Case, Suite
from benchmarks.sides.workload import ModelSize, VisionWorkload, draw_lengths
from benchmarks.suites.step import BOUNDS, DESCRIPTIONS, QUICK_SIZE, SPREAD, LengthProfile, case_of, without_and_with

FAMILIES = ("qwen3_vl", "smolvlm", "mistral3", "gemma3")
PROFILES = {"1 image": (1, False), "2 images": (2, False), "LoRA, 1 image": (1, True)}
"""Number of images of a pair, and whether adapters are trained."""
TEXT = LengthProfile(200, 1.0)  # of a question about a picture and its answer
PAIRS = 4


def build_cases(quick: bool) -> list[Case]:
    profile, pairs, side, tower = (LengthProfile(20, 1.0), 2, 64, (1, 32)) if quick else (TEXT, PAIRS, 256, (6, 192))
    lengths = (draw_lengths(*profile, pairs, 0, spread=SPREAD, bounds=BOUNDS),)
    cases = []
    for family in FAMILIES:
        for group, (images, lora) in PROFILES.items():
            size = QUICK_SIZE if quick else ModelSize()
            work = VisionWorkload(lengths, lora, size=size, family=family, images=images, side=side, tower=tower)
            sides = without_and_with("benchmarks.sides.vision:VisionStep", work)
            cases.append(case_of(f"{family}/{group}", group, profile, sides))
    return cases


SUITE = Suite(
    name="vision",
    title="DPO training step in TRL on pairs with images: policy forward and backward, reference forward",
    truth="benchmarks.sides.vision:ExactVisionStep",
    cases=build_cases,
    rounds=3,
    descriptions=DESCRIPTIONS,
)
