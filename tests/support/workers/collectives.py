"""One rank of a training whose logs and collectives are compared."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import TrainerCallback

import fastdpo
from tests.support.trl.dpo import DPO, numbers, pairs, tiny_model

COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object")


def train_rank(directory: Path, kind: str) -> None:
    """Writes the logs, fastdpo's counters and the number of collectives in each step to a file.

    `kind` is "stock", "patched" or "uncut": stock with an accelerate that gathers the values of all ranks at the end
    of an epoch.
    """
    rank = int(os.environ["RANK"])
    counts: list[int] = [0]
    for name in COLLECTIVES:
        stock = getattr(dist, name)

        def counting(*args, stock=stock, **kwargs):
            counts[-1] += 1
            return stock(*args, **kwargs)

        setattr(dist, name, counting)

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            # Collectives until the next call belong to logging and to the next step.
            counts.append(0)

    if kind == "uncut":
        Accelerator.gather_for_metrics = Accelerator.gather
    elif kind != "stock":
        fastdpo.patch("trl.DPOTrainer")
    sizes = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=-1, num_train_epochs=3)
    models = tiny_model(seed=0), tiny_model(seed=1)
    options = dict(data=pairs(8), evaluate=5, logging_steps=2, callbacks=[Steps()])
    trainer = DPO.build(directory / f"out{rank}", *models, **sizes, **options)
    trainer.train()
    counts.append(0)
    trainer.evaluate()
    world = dist.get_world_size()
    logs = [numbers(log) for log in trainer.state.log_history]
    torch.save({"logs": logs, "calls": dict(fastdpo.calls), "counts": counts}, directory / f"rank{rank}of{world}.pt")
