"""A step of TRL's `DPOTrainer` on pairs with images, for three families of small models."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.sides.workload import ModelSize, VisionWorkload, draw_lengths
from benchmarks.suites.step import BOUNDS, LABELLED, QUICK_SIZE, SPREAD, STOCK, LengthProfile, case_of

FAMILIES = ("qwen3_vl", "smolvlm", "mistral3")
TEXT = LengthProfile(200, 1.0)  # of a question about a picture and its answer
PAIRS = 4


def build_cases(quick: bool) -> list[Case]:
    profile, pairs, side, tower = (LengthProfile(20, 1.0), 2, 64, (1, 32)) if quick else (TEXT, PAIRS, 256, (6, 192))
    lengths = (draw_lengths(*profile, pairs, 0, spread=SPREAD, bounds=BOUNDS),)
    cases = []
    for family in FAMILIES:
        for images in (1, 2):
            size = QUICK_SIZE if quick else ModelSize()
            work = VisionWorkload(lengths, size=size, family=family, images=images, side=side, tower=tower)
            sides = tuple(
                Side(name, "benchmarks.sides.vision:VisionStep", work, {"mode": mode})
                for name, mode in ((STOCK, "stock"), (LABELLED, "labelled"), (SUBJECT, "fastdpo"))
            )
            plural = "" if images == 1 else "s"
            cases.append(case_of(f"{family}/{images} image{plural}", f"{images} image{plural}", profile, sides))
    return cases


SUITE = Suite(
    name="vision",
    title="DPO training step in TRL on pairs with images: policy forward and backward, reference forward",
    truth="benchmarks.sides.vision:ExactVisionStep",
    cases=build_cases,
    rounds=3,
)
