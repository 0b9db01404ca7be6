"""Tiny KTO trainings in TRL, recorded step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from peft import PeftConfig
from transformers import PreTrainedModel
from trl import KTOConfig, KTOTrainer

from tests.support.trl.dpo import OPTIONS, Run, dataset_for, pairs, record, tokenizer, train_both


def rows(n: int, seed: int = 0) -> list[dict]:
    """Ragged completions with labels. Neighbours often have the same prompt.

    All completions of rows 4 to 7 are desirable, and all of rows 8 to 11 undesirable.
    """
    unpaired = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs((n + 1) // 2, seed)
        for name in ("chosen", "rejected")
    ]
    for i, row in enumerate(unpaired):
        row["label"] = {1: True, 2: False}.get(i // 4, row["label"])
    return unpaired[:n]


def config(directory: Path, **overrides) -> KTOConfig:
    return KTOConfig(**{"output_dir": str(directory / "out"), **OPTIONS, "per_device_eval_batch_size": 4, **overrides})


def train_kto(
    directory: Path,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    *,
    peft_config: PeftConfig | None = None,
    data: list[dict] | None = None,
    evaluate: int = 0,
    only_evaluate: bool = False,
    trainer_class: type[KTOTrainer] = KTOTrainer,
    compute_metrics: Callable | None = None,
    **overrides,
) -> Run:
    """Runs a short KTO training on `data` (default: `rows`) with the patches that are active.

    `evaluate` is a number of rows that are evaluated after the training, or instead of it if
    `only_evaluate`. `overrides` are fields of `KTOConfig`.
    """
    make = functools.partial(
        trainer_class,
        model=model,
        ref_model=reference,
        args=config(directory, **overrides),
        train_dataset=dataset_for(overrides, data or rows(16), directory / "train"),
        eval_dataset=dataset_for(overrides, rows(evaluate, seed=1), directory / "eval") if evaluate else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
        compute_metrics=compute_metrics,
    )
    return record(make, evaluate=evaluate > 0, only_evaluate=only_evaluate)


train_both_kto = functools.partial(train_both, trainer="trl.KTOTrainer", train=train_kto)
"""`trl.dpo.train_both` for KTO."""
