"""Patched trainings with the TRL that comes first on the path.

Usage: `python -m tests.support.workers.trainings DIRECTORY TRAINER ...`. Saves a run
of each trainer in the directory, one of DPOTrainer on pairs with images, the three
of `trl.online.train_three`, of which two are not patched, and those of SFT and KTO with
and without `max_tokens`.
"""

import functools
import gc
import sys
from dataclasses import replace
from pathlib import Path

import torch
import trl
from transformers import PreTrainedModel

import fastdpo
from tests.support.trl.a2po import train_a2po
from tests.support.trl.dpo import Run, tiny_model, train
from tests.support.trl.groups import AGAIN, NAMES, train_group
from tests.support.trl.kto import train_kto
from tests.support.trl.online import train_three
from tests.support.trl.reference_free import train_cpo, train_orpo
from tests.support.trl.reward import reward_model, train_reward
from tests.support.trl.sft import train_sft
from tests.support.trl.tpo import train_tpo
from tests.support.workers import budgets, vision


def train_on_groups(trainer_class: type, directory: Path, model, reference, evaluate: int) -> Run:
    run = train_group(directory, model, trainer_class, evaluate, reference=reference, beta=0.1, **AGAIN)
    return Run(run.logs, run.gradients, run.calls, run.steps)


TRAIN = {
    "trl.DPOTrainer": train,
    "trl.KTOTrainer": train_kto,
    "trl.RewardTrainer": train_reward,
    "trl.SFTTrainer": train_sft,
    "trl.CPOTrainer": train_cpo,
    "trl.ORPOTrainer": train_orpo,
    "trl.TPOTrainer": train_tpo,
    "trl.A2POTrainer": train_a2po,
    **{name: functools.partial(train_on_groups, trainer_class) for trainer_class, name in NAMES.items()},
}
"""Maps the name of a trainer to a function that trains with it, like `trl.dpo.train`."""


def model_of(trainer: str, seed: int) -> PreTrainedModel:
    return (reward_model if trainer == "trl.RewardTrainer" else tiny_model)(seed=seed)


def patched_run(directory: Path, trainer: str) -> Run:
    with fastdpo.patched(trainer):
        return TRAIN[trainer](directory, model_of(trainer, 0), model_of(trainer, 1), evaluate=6)


def save(path: Path, *runs: Run) -> None:
    torch.save({"version": trl.__version__, "runs": [vars(replace(run, in_float64=None)) for run in runs]}, path)


def main(directory: Path, *trainers: str) -> None:
    gc.freeze()  # trainings collect garbage, which takes long among all that is imported
    for trainer in trainers:
        save(directory / f"{trainer}.pt", patched_run(directory / trainer, trainer))
    save(directory / "images.pt", vision.patched_run(directory / "images"))
    save(directory / "online.pt", *train_three(directory / "online"))
    for trainer in budgets.TRAINERS:
        save(
            directory / f"{trainer} cut.pt",
            *budgets.with_and_without(directory / f"{trainer} cut", trainer, budgets.MAX_TOKENS[trainer], evaluate=4),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
