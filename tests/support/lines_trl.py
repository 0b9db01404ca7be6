"""TRL's DPOTrainer, of either line, as the tests of properties want it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version
from transformers import PreTrainedModel
from trl import DPOTrainer
from trl_runs import Run, pairs, run_two_ranks, tiny_model, tokenizer
from trl_runs import train as train_trl

import fastdpo

BETA = 0.1
PREFIX = ""
"""Prefix of the names of gradients, before the causal LM's own."""
RANKS_APART = {"logits/chosen", "logits/rejected"} if Version(version("trl")) < Version("0.29") else set()
"""Metrics that TRL averaged over ranks, before its rewrite, as if all ranks had as many tokens."""


class ReferenceIsGone(DPOTrainer):
    def training_step(self, *args, **kwargs):
        for parameter in self.ref_model.parameters():
            parameter.data.fill_(torch.nan)
        return super().training_step(*args, **kwargs)


def models(directory: Path) -> tuple[PreTrainedModel, ...]:
    """Policy and reference, in float32, as trainings start with them."""
    return tiny_model(seed=0), tiny_model(seed=1)


def train(directory: Path, **options) -> Run:
    """Patched, 16 pairs of which 12 are used."""
    with fastdpo.patched():
        return train_trl(directory, *models(directory), **options)


def train_with_known_reference(directory: Path) -> Run:
    """With log-probabilities that were computed before the training, and no reference to run in it."""
    return train(directory, precompute_ref_log_probs=True, trainer_class=ReferenceIsGone)


def rows() -> dict[tuple[int, ...], int]:
    """The ids of every row of the training data, and where its answer begins."""
    words, found = tokenizer(), {}
    for row in pairs(16):
        prompt = words(row["prompt"])["input_ids"]
        for answer in (row["chosen"], row["rejected"]):
            found[*prompt, *words(answer)["input_ids"], words.eos_token_id] = len(prompt)
    return found


def two_ranks_and_one(directory: Path) -> tuple[list[dict], list[dict]]:
    """The logs of two ranks, and of one process that has the pairs of both in each batch."""
    two = run_two_ranks("patched", directory)[0]["logs"]
    one = train(directory / "one", data=pairs(8), max_steps=-1, num_train_epochs=3, logging_steps=2)
    return [log for log in two if "eval_loss" not in log], one.logs
