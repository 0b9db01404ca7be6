"""One training that logs its savings, on one rank or on several."""

import os
from pathlib import Path

import torch
from transformers import TrainerCallback
from trl import DPOTrainer
from trl_runs import config, dataset, numbers, tiny_model, tokenizer

import fastdpo
from fastdpo.models import fallback


class Recorded(TrainerCallback):
    """What a tracker gets, and the counters of this rank at the end of each step."""

    def __init__(self):
        self.logs: list[dict] = []
        self.tokens: list[tuple[int, int]] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.tokens.append(tuple(fallback.tokens["trl.DPOTrainer", name] for name in ("given", "computed")))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(numbers(logs))


def train(directory: Path, **options) -> Recorded:
    """Trains 4 steps and logs 2, and evaluates between them and at the end."""
    fallback.tokens.clear()
    recorded = Recorded()
    with fastdpo.patched("trl.DPOTrainer", **options):
        trainer = DPOTrainer(
            model=tiny_model(seed=0),
            ref_model=tiny_model(seed=1),
            args=config(
                directory / "out",
                per_device_train_batch_size=2,
                per_device_eval_batch_size=2,
                max_steps=4,
                logging_steps=2,
                save_strategy="steps",
                save_steps=3,
            ),
            train_dataset=dataset(8, directory / "data"),
            eval_dataset=dataset(4, directory / "eval", seed=1),
            processing_class=tokenizer(),
            callbacks=[recorded],
        )
        trainer.train()
        trainer.evaluate()
    return recorded


def train_rank(directory: Path) -> None:
    rank = os.environ["RANK"]
    directory /= f"rank{rank}"
    recorded = train(directory, log_savings=True)
    torch.save(vars(recorded), directory.with_suffix(".pt"))
