"""One rank of a patched training with precomputed reference log-probs and a dataset in memory."""

import os
from collections import Counter
from pathlib import Path

import datasets
import torch
import torch.distributed as dist
from datasets import Dataset
from trl import DPOTrainer

import fastdpo
from tests.support.trl.dpo import config, pairs, tiny_model, tokenizer


def train_rank(directory: Path) -> None:
    """Writes the log-probabilities and fastdpo's counters to a file in the directory."""
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    rank = int(os.environ["RANK"])
    fastdpo.patch("trl.DPOTrainer")
    trainer = DPOTrainer(
        model=tiny_model(seed=0),
        ref_model=tiny_model(seed=1),
        args=config(
            directory / f"out{rank}",
            precompute_ref_log_probs=True,
            precompute_ref_batch_size=2,
            per_device_train_batch_size=2,
            max_steps=2,
        ),
        train_dataset=Dataset.from_list(pairs(10)),
        eval_dataset={"first": Dataset.from_list(pairs(3, seed=1)), "second": Dataset.from_list(pairs(2, seed=2))},
        processing_class=tokenizer(),
    )
    precomputed = Counter(fastdpo.calls)
    trainer.train()
    trainer.evaluate()
    columns = trainer.train_dataset
    torch.save(
        {
            "world": dist.get_world_size(),
            "chosen": torch.tensor(columns["ref_chosen_logps"][:]),
            "rejected": torch.tensor(columns["ref_rejected_logps"][:]),
            "precomputed": dict(precomputed),
            "trained": dict(fastdpo.calls - precomputed),
        },
        directory / f"rank{rank}.pt",
    )
