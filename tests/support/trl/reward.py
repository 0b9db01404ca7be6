"""Tiny trainings of reward models in TRL, recorded step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftConfig, TaskType
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
from trl import RewardConfig, RewardTrainer

from tests.support.comparison import SIZES, sharpen
from tests.support.models.families import FUSED, STOCK, kind
from tests.support.trl.dpo import LORA, WORDS, Run, pairs, record, tokenizer, train_both
from tests.support.trl.dpo import OPTIONS as ARGUMENTS
from tests.support.trl.verified import assert_scores_verified


def reward_model(kind: str = "llama", seed: int = 0, without: tuple[str, ...] = (), **config) -> PreTrainedModel:
    """A tiny reward model, with what `trl.dpo.tiny_model` has but its LM head."""
    sizes = {**SIZES, "vocab_size": len(WORDS), "head_dim": 8, "num_labels": 1}
    torch.manual_seed(seed)
    sizes = {name: size for name, size in sizes.items() if name not in without}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **{**sizes, **config}))
    sharpen(model)
    return model


def reward_family(name: str, seed: int = 0, **config) -> PreTrainedModel:
    """A tiny reward model of one of the families in `FUSED` and `STOCK`."""
    return reward_model(kind(name), seed, **(FUSED | STOCK)[name][1] | config)


def has_classifier(name: str) -> bool:
    """Whether transformers has a class of reward models for a family."""
    return kind(name) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


CLASSIFIERS = tuple(filter(has_classifier, FUSED))
"""The packed families that there are reward models of. Each of them is trained."""


def config(directory: Path, **overrides) -> RewardConfig:
    return RewardConfig(
        **{"output_dir": str(directory / "out"), **ARGUMENTS, "per_device_eval_batch_size": 4, **overrides}
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
    others: Sequence[TrainerCallback] = (),
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
        train_dataset=Dataset.from_list(data or pairs(16)),
        eval_dataset=Dataset.from_list(pairs(evaluate, seed=1)) if evaluate else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
        compute_metrics=compute_metrics,
    )
    return record(lambda callbacks: make(callbacks=[*callbacks, *others]), evaluate=evaluate > 0)


train_both_rewards = functools.partial(
    train_both, reference=False, trainer="trl.RewardTrainer", train=train_reward, build=reward_model
)
"""`trl.dpo.train_both` for reward models."""


def adapter(**options) -> dict:
    return dict(peft_config=LoraConfig(**{**LORA, "task_type": TaskType.SEQ_CLS, **options}))


def with_margins(n: int) -> list[dict]:
    return [{**row, "margin": 0.1 * i} for i, row in enumerate(pairs(n))]


def implicit_prompts(n: int) -> list[dict]:
    return [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in pairs(n)]


FULL = dict(policy=3)

OPTIONS = {
    "explicit_prompts": (dict(), FULL),
    "implicit_prompts": (dict(data=implicit_prompts(16)), FULL),
    "margins": (dict(data=with_margins(16)), FULL),
    "centered": (dict(center_rewards_coefficient=0.3), FULL),
    "evaluation": (dict(evaluate=6), dict(policy=3, eval=2)),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4)),
    "batch_of_one": (dict(per_device_train_batch_size=1), FULL),
    "last_batch_is_partial": (dict(per_device_train_batch_size=6), FULL),
    "filtered": (dict(max_length=14), FULL),
    "pad_to_multiple_of": (dict(pad_to_multiple_of=16), FULL),
    "padding_is_end": (dict(pad_token="<eos>"), FULL),  # the score is that of the token before the end
    "adapter": (dict(evaluate=4, **adapter()), dict(policy=3, eval=1)),  # PEFT trains and saves `score`
    "adapter_without_score": (adapter(task_type=None), FULL),
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "checkpointing_adapter": (dict(gradient_checkpointing=True, **adapter()), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=1)),
}
"""Changed arguments of `train_reward`, and the number of calls of each kind."""


def assert_verified_rewards(directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`verified.assert_scores_verified` for TRL's RewardTrainer."""

    def train(name: str) -> None:
        train_reward(directory / name, reward_model(), evaluate=4)

    assert_scores_verified(train, "trl.RewardTrainer", monkeypatch, caplog)
