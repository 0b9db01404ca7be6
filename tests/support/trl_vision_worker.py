"""A patched training on pairs with images, with the TRL that comes first on the path.

Usage: `python trl_vision_worker.py DIRECTORY trl.DPOTrainer`. The run is saved in the directory.
"""

import sys
from pathlib import Path

import torch
import trl
from multimodal_families import tiny_multimodal
from trl_runs import Run
from vision_runs import FAMILIES, train_vision

import fastdpo

NAME = "qwen3_vl"


def patched_run(directory: Path, trainer: str) -> Run:
    models = (tiny_multimodal(NAME, seed, **FAMILIES[NAME].rest) for seed in range(2))
    with fastdpo.patched(trainer):
        return train_vision(NAME, directory, *models, max_steps=2, evaluate=(1, 2, 0, 1))


def main(directory: Path, trainer: str) -> None:
    run = patched_run(directory, trainer)
    torch.save({"version": trl.__version__, "run": vars(run)}, directory / "run.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
