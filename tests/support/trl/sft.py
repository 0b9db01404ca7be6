"""Tiny SFT trainings in TRL, recorded step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

from tests.support.trl.dpo import OPTIONS, Run, pairs, record, tokenizer, train_both


def rows(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Ragged prompts and completions. Some neighbours have the same prompt."""
    both = [
        {"prompt": pair["prompt"], "completion": pair[name]}
        for pair in pairs((n + 1) // 2, seed)
        for name in ("chosen", "rejected")
    ]
    return both[:n]


def texts(n: int, seed: int = 0) -> list[dict[str, str]]:
    return [{"text": row["prompt"] + row["completion"]} for row in rows(n, seed)]


def config(directory: Path, **overrides) -> SFTConfig:
    return SFTConfig(**{"output_dir": str(directory / "out"), **OPTIONS, "per_device_eval_batch_size": 4, **overrides})


def train_sft(
    directory: Path,
    model: PreTrainedModel,
    reference: PreTrainedModel | None = None,
    *,
    peft_config: PeftConfig | None = None,
    data: Callable[..., list[dict]] = rows,
    evaluate: int = 0,
    trainer_class: type[SFTTrainer] = SFTTrainer,
    compute_loss_func: Callable | None = None,
    compute_metrics: Callable | None = None,
    **overrides,
) -> Run:
    """Runs a short SFT on 16 rows of `data` with the patches that are active. There is no reference.

    `evaluate` is a number of rows that are evaluated after the training. `overrides` are fields of
    `SFTConfig`.
    """
    make = functools.partial(
        trainer_class,
        model=model,
        args=config(directory, **overrides),
        train_dataset=Dataset.from_list(data(16)),
        eval_dataset=Dataset.from_list(data(evaluate, seed=1)) if evaluate else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
        compute_loss_func=compute_loss_func,
        compute_metrics=compute_metrics,
    )
    return record(make, evaluate=evaluate > 0)


train_both_sft = functools.partial(train_both, reference=False, trainer="trl.SFTTrainer", train=train_sft)
"""`trl.dpo.train_both` for SFT."""
