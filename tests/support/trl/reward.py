"""Tiny trainings of reward models in TRL, recorded step by step."""

from __future__ import annotations

import functools

from peft import LoraConfig, TaskType
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
from trl import RewardConfig, RewardTrainer

from tests.support.comparison import tiny
from tests.support.models.families import FUSED, STOCK, kind
from tests.support.trl.dpo import LORA, WORDS, Recipe, pairs, train_both


def reward_model(kind: str = "llama", seed: int = 0, **config) -> PreTrainedModel:
    """A tiny reward model, with what `trl.dpo.tiny_model` has but its LM head."""
    return tiny(AutoModelForSequenceClassification, kind, len(WORDS), seed, **{"num_labels": 1, **config})


def reward_family(name: str, seed: int = 0, **config) -> PreTrainedModel:
    """A tiny reward model of one of the families in `FUSED` and `STOCK`."""
    return reward_model(kind(name), seed, **(FUSED | STOCK)[name][1] | config)


def has_classifier(name: str) -> bool:
    """Whether transformers has a class of reward models for a family."""
    return kind(name) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


CLASSIFIERS = tuple(filter(has_classifier, FUSED))
"""The packed families that there are reward models of. Each of them is trained."""


REWARD = Recipe(RewardTrainer, RewardConfig, pairs, has_reference=False)
config, train_reward = REWARD.config, REWARD.train
train_both_rewards = functools.partial(
    train_both, reference=False, trainer="trl.RewardTrainer", train=train_reward, build=reward_model
)
"""`trl.dpo.train_both` for reward models."""


def adapter(**options) -> dict:
    return dict(peft_config=LoraConfig(**{**LORA, "task_type": TaskType.SEQ_CLS, **options}))
