"""Trainings of GRPO and RLOO in float64 whose steps accumulate batches, in one process or on one of several ranks."""

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOTrainer

import fastdpo
from tests.support.comparison import double
from tests.support.trl.dpo import Gradients, numbers
from tests.support.trl.groups import NAMES, build_group
from tests.support.trl.online import writer

STEPS = dict(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    num_generations=4,
    beta=0.1,
    max_steps=2,
    learning_rate=0.05,
    epsilon=0.02,
)
"""Steps of 16 rows: four prompts in one process, two on each of two ranks."""
MAX_TOKENS = 45


class Trained(NamedTuple):
    """The numbers of each log of a training, the gradients of each step, and the calls that were counted."""

    logs: list[dict[str, float]]
    gradients: list[dict[str, torch.Tensor]]
    calls: Counter


def trained(
    directory: Path,
    trainer_class: type = GRPOTrainer,
    reference: PreTrainedModel | Path | None = None,
    callbacks: list[TrainerCallback] | None = None,
    **options,
) -> Trained:
    """Trains with the patches that are active. `options` are arguments of `build_group`."""
    gradients: list = []
    before = fastdpo.calls.copy()
    given = {**STEPS, "steps_per_generation": options.get("gradient_accumulation_steps", 4), **options}
    if "peft_config" not in options and reference is None:
        reference = double(writer(1))
    every_callback = [Gradients(gradients), *(callbacks or ())]
    policy = double(writer(0))
    trainer = build_group(directory, policy, trainer_class, reference=reference, callbacks=every_callback, **given)
    trainer.train()
    logs = [numbers(log) for log in trainer.state.log_history]
    return Trained(logs, gradients, Counter({key[1:]: n for key, n in (fastdpo.calls - before).items()}))


def train_rank(directory: Path) -> None:
    """Writes a stock and a patched training of each trainer to a file in the directory."""
    rank, runs = int(os.environ["RANK"]), []
    reference = directory / f"reference of rank {rank}"
    double(writer(1)).save_pretrained(reference)  # before the processes form a group, in which only one of them saves
    for trainer_class, name in NAMES.items():
        stock = trained(directory / f"{name} of rank {rank}", trainer_class, reference)
        with fastdpo.patched(name, max_tokens=MAX_TOKENS):
            patched = trained(directory / f"patched {name} of rank {rank}", trainer_class, reference)
        runs.append((tuple(stock), tuple(patched)))
    torch.save({"runs": runs, "world": dist.get_world_size()}, directory / f"rank{rank}.pt")
