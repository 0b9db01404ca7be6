"""A patched training on pairs with images, for `trainings`."""

from pathlib import Path

import fastdpo
from tests.support.models.multimodal import tiny_multimodal
from tests.support.trl.dpo import Run
from tests.support.trl.vision import FAMILIES, train_vision

NAME = "qwen3_vl"


def patched_run(directory: Path) -> Run:
    models = (tiny_multimodal(NAME, seed, **FAMILIES[NAME].rest) for seed in range(2))
    with fastdpo.patched("trl.DPOTrainer"):
        return train_vision(NAME, directory, *models, max_steps=2, evaluate=(1, 2, 0, 1))
