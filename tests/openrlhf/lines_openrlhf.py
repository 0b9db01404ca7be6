"""OpenRLHF's DPOTrainer as the tests of properties want it. `lines_trl.py` says what each name is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openrlhf_runs
import torch
from openrlhf_runs import Run, Strategy, checkpoint, run_two_ranks, tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import fastdpo

BETA = 0.1
PREFIX = "model."
RANKS_APART = {"loss_mean", "acc_mean"}  # each rank's own


def _paths(directory: Path) -> list[Path]:
    return [checkpoint(directory, seed=seed) for seed in range(2)]


def models(directory: Path) -> tuple[PreTrainedModel, ...]:
    loaded = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in _paths(directory))
    return tuple(model.float() for model in loaded)


def train(directory: Path, memory: Any = False, **options) -> Run:
    directory.mkdir(exist_ok=True)
    with fastdpo.patched(reference_memory=memory):
        return openrlhf_runs.train(*_paths(directory), Strategy(packing_samples=True), **options)


def train_with_known_reference(directory: Path) -> Run:
    """A hook that refuses to run the reference would turn the memory off: the counters of calls tell instead."""
    memory = directory / "memory"
    train(directory, memory)
    known = train(directory, memory)
    assert {path for kind, path in known.calls if kind == "reference"} == {"remembered"}, "the reference ran"
    return known


def rows() -> dict[tuple[int, ...], int]:
    words, found = tokenizer(), {}
    for row in openrlhf_runs.rows(12):
        for answer in (row["chosen"], row["rejected"]):
            ids = words(row["prompt"] + answer + " <eos>")["input_ids"]
            found[tuple(ids)] = len(words(row["prompt"])["input_ids"])
    return found


def two_ranks_and_one(directory: Path) -> tuple[list[dict], list[dict]]:
    two = run_two_ranks(directory, stage=2)
    parts = [openrlhf_runs.rows(12, seed) for seed in range(2)]
    data = [row for start in range(0, 12, 4) for part in parts for row in part[start : start + 4]]
    return two[0]["patched"]["logs"], train(directory / "one", data=data, batch=8).logs
