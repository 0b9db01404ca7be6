"""A patched training with the TRL that comes first on the path.

Usage: `python trl_worker.py DIRECTORY TRAINER`. The run is saved in the directory.
"""

import functools
import sys
from pathlib import Path

import torch
import trl
from trl_group_runs import AGAIN, NAMES, train_group
from trl_kto_runs import train_kto
from trl_reference_free_runs import train_cpo, train_orpo
from trl_runs import Run, tiny_model, train
from trl_sft_runs import train_sft

import fastdpo


def train_on_groups(trainer_class: type, directory: Path, model, reference, evaluate: int) -> Run:
    run = train_group(directory, model, trainer_class, evaluate, reference=reference, beta=0.1, **AGAIN)
    return Run(run.logs, run.gradients, run.calls, run.steps)


TRAIN = {
    "trl.DPOTrainer": train,
    "trl.KTOTrainer": train_kto,
    "trl.SFTTrainer": train_sft,
    "trl.CPOTrainer": train_cpo,
    "trl.ORPOTrainer": train_orpo,
    **{name: functools.partial(train_on_groups, trainer_class) for trainer_class, name in NAMES.items()},
}
"""Maps the name of a trainer to a function that trains with it, like `trl_runs.train`."""


def patched_run(directory: Path, trainer: str) -> Run:
    with fastdpo.patched(trainer):
        return TRAIN[trainer](directory, tiny_model(seed=0), tiny_model(seed=1), evaluate=6)


def main(directory: Path, trainer: str) -> None:
    run = patched_run(directory, trainer)
    torch.save({"version": trl.__version__, "run": vars(run)}, directory / "run.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
