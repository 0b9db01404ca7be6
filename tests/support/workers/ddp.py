"""One rank of a patched training under DDP."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from trl import DPOTrainer

import fastdpo
from tests.support.trl.dpo import Gradients, config, dataset, tiny_model, tokenizer


def train_rank(directory: Path, batch: int) -> None:
    """Trains two steps, and writes gradients, losses and counters to a file in the directory."""
    rank = int(os.environ["RANK"])
    gradients, lengths = [], []
    fastdpo.patch("trl.DPOTrainer")
    trainer = DPOTrainer(
        model=tiny_model(seed=0),
        ref_model=tiny_model(seed=1),
        args=config(directory / f"out{rank}", per_device_train_batch_size=batch, max_steps=2),
        train_dataset=dataset(8, directory / f"data{rank}"),
        processing_class=tokenizer(),
        callbacks=[Gradients(gradients)],
    )
    stock = trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        lengths.append(inputs["attention_mask"].sum(1).tolist())
        return stock(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    world = dist.get_world_size()
    torch.save(
        {
            "gradients": [{n.removeprefix("module."): g for n, g in step.items()} for step in gradients],
            "lengths": lengths,
            "calls": dict(fastdpo.calls),
            "world": world,
            "wrapped": type(trainer.model_wrapped).__name__,
            "loss": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        },
        directory / f"rank{rank}of{world}.pt",
    )
