"""Stock and patched online trainings with the TRL that comes first on the path.

Usage: `python -m tests.support.workers.online DIRECTORY`. The runs are saved in the directory.
"""

import sys
from pathlib import Path

import torch
import trl
from trl.experimental.online_dpo import OnlineDPOTrainer

import fastdpo
from tests.support.trl.online import masked, train_online, writer


def main(directory: Path) -> None:
    runs = [
        train_online(directory / name, writer(0), writer(1), trainer_class)
        for name, trainer_class in (("stock", OnlineDPOTrainer), ("masked", masked(OnlineDPOTrainer)))
    ]
    with fastdpo.patched("trl.OnlineDPOTrainer"):
        runs.append(train_online(directory / "patched", writer(0), writer(1)))
    torch.save({"version": trl.__version__, "runs": [vars(run) for run in runs]}, directory / "runs.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
