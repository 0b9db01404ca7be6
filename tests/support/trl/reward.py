"""Tiny trainings of reward models in TRL, recorded step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from peft import PeftConfig
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from trl import RewardConfig, RewardTrainer

from tests.support.comparison import SIZES, sharpen
from tests.support.models.families import FUSED, kind
from tests.support.trl.dpo import OPTIONS, WORDS, Run, on_disk, pairs, record, tokenizer, train_both


def reward_model(kind: str = "llama", seed: int = 0, without: tuple[str, ...] = (), **config) -> PreTrainedModel:
    """A tiny reward model, with what `trl.dpo.tiny_model` has but its LM head."""
    sizes = {**SIZES, "vocab_size": len(WORDS), "head_dim": 8, "num_labels": 1}
    torch.manual_seed(seed)
    sizes = {name: size for name, size in sizes.items() if name not in without}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **{**sizes, **config}))
    sharpen(model)
    return model


def reward_family(name: str, seed: int = 0, **config) -> PreTrainedModel:
    """A tiny reward model of one of the families in `FUSED`."""
    return reward_model(kind(name), seed, **FUSED[name][1] | config)


def config(directory: Path, **overrides) -> RewardConfig:
    return RewardConfig(
        **{"output_dir": str(directory / "out"), **OPTIONS, "per_device_eval_batch_size": 4, **overrides}
    )


def train_reward(
    directory: Path,
    model: PreTrainedModel,
    reference: PreTrainedModel | None = None,
    *,
    peft_config: PeftConfig | None = None,
    data: list[dict] | None = None,
    evaluate: int = 0,
    trainer_class: type[RewardTrainer] = RewardTrainer,
    compute_metrics: Callable | None = None,
    **overrides,
) -> Run:
    """Runs a short training on `data` (default: 16 of `pairs`) with the patches that are active. There is no
    reference.

    `evaluate` is a number of pairs that are evaluated after the training. `overrides` are fields of
    `RewardConfig`.
    """
    make = functools.partial(
        trainer_class,
        model=model,
        args=config(directory, **overrides),
        train_dataset=on_disk(data or pairs(16), directory / "train"),
        eval_dataset=on_disk(pairs(evaluate, seed=1), directory / "eval") if evaluate else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
        compute_metrics=compute_metrics,
    )
    return record(make, evaluate=evaluate > 0)


train_both_rewards = functools.partial(
    train_both, reference=False, trainer="trl.RewardTrainer", train=train_reward, build=reward_model
)
"""`trl.dpo.train_both` for reward models."""
