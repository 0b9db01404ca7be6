"""OpenRLHF's DPOTrainer behind the interface that tests/properties uses.

See `tests.support.trl.line` for a description of each name.
"""

from __future__ import annotations

from pathlib import Path

import openrlhf_runs
import torch
from openrlhf_runs import Run, Strategy, checkpoint, run_two_ranks, tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import fastdpo

BETA = 0.1
PREFIX = "model."
RANKS_APART = {"loss_mean", "acc_mean"}  # not averaged over ranks


def _paths(directory: Path) -> list[Path]:
    return [checkpoint(directory, seed=seed) for seed in range(2)]


def models(directory: Path) -> tuple[PreTrainedModel, ...]:
    loaded = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in _paths(directory))
    return tuple(model.float() for model in loaded)


def train(directory: Path, **options) -> Run:
    directory.mkdir(exist_ok=True)
    with fastdpo.patched():
        return openrlhf_runs.train(*_paths(directory), Strategy(packing_samples=True), **options)


def rows() -> dict[tuple[int, ...], int]:
    encode, starts = tokenizer(), {}
    for row in openrlhf_runs.rows(12):
        for answer in (row["chosen"], row["rejected"]):
            ids = encode(row["prompt"] + answer + " <eos>")["input_ids"]
            starts[tuple(ids)] = len(encode(row["prompt"])["input_ids"])
    return starts


def two_ranks_and_one(directory: Path) -> tuple[list[dict], list[dict]]:
    two = run_two_ranks(directory, stage=2)
    parts = [openrlhf_runs.rows(12, seed) for seed in range(2)]
    data = [row for start in range(0, 12, 4) for part in parts for row in part[start : start + 4]]
    return two[0]["patched"]["logs"], train(directory / "one", data=data, batch=8).logs
