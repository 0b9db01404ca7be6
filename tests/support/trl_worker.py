"""A patched training with the TRL that comes first on the path.

Usage: `python trl_worker.py DIRECTORY`. The run is saved in the directory.
"""

import sys
from pathlib import Path

import torch
import trl
from trl_runs import tiny_model, train

import fastdpo


def main(directory: Path) -> None:
    with fastdpo.patched("trl.DPOTrainer"):
        run = train(directory, tiny_model(seed=0), tiny_model(seed=1), evaluate=6)
    torch.save({"version": trl.__version__, "run": vars(run)}, directory / "run.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
