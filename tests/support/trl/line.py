"""TRL's DPOTrainer, of either supported line, behind the interface that tests/properties uses."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from packaging.version import Version
from transformers import PreTrainedModel

import fastdpo
from tests.support.trl.dpo import Run, pairs, run_two_ranks, tiny_model, tokenizer
from tests.support.trl.dpo import train as train_trl

BETA = 0.1
PREFIX = ""
"""Prefix of the gradients' names, in front of the causal LM's parameter names."""
RANKS_APART = {"logits/chosen", "logits/rejected"} if Version(version("trl")) < Version("0.29") else set()
"""Metrics that the trainer averages over ranks as if each rank had the same number of tokens.

TRL did so before version 0.29.
"""


def models(directory: Path) -> tuple[PreTrainedModel, ...]:
    """The initial policy and reference of the trainings, in float32."""
    return tiny_model(seed=0), tiny_model(seed=1)


def train(directory: Path, **options) -> Run:
    """A patched training on 12 of 16 pairs."""
    with fastdpo.patched():
        return train_trl(directory, *models(directory), **options)


def rows() -> dict[tuple[int, ...], int]:
    """Maps the ids of every row of the training data to the index of its answer's first token."""
    encode, starts = tokenizer(), {}
    for row in pairs(16):
        prompt = encode(row["prompt"])["input_ids"]
        for answer in (row["chosen"], row["rejected"]):
            starts[*prompt, *encode(answer)["input_ids"], encode.eos_token_id] = len(prompt)
    return starts


def two_ranks_and_one(directory: Path) -> tuple[list[dict], list[dict]]:
    """Logs of a training on two ranks, and of one process with the pairs of both in each batch."""
    two = run_two_ranks("patched", directory)[0]["logs"]
    one = train(directory / "one", data=pairs(8), max_steps=-1, num_train_epochs=3, logging_steps=2)
    return [log for log in two if "eval_loss" not in log], one.logs
