"""Tiny A2PO trainings in TRL, recorded step by step.

The policy generates a completion of each prompt, and its implicit reward is regressed onto the advantage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from trl.experimental.a2po import A2POConfig, A2POTrainer

from tests.support.trl.dpo import Recipe
from tests.support.trl.groups import prompts

GENERATION = dict(max_completion_length=8, num_value_samples=2, filter_all_incorrect=False, beta2=0.1)


def reward(completions: list[str], **columns) -> list[float]:
    return [float(len(completion.split()) % 2) for completion in completions]


class A2PORecipe(Recipe):
    def build(self, directory: Path, model: PreTrainedModel | str, *args: Any, **options: Any) -> A2POTrainer:
        trainer = super().build(directory, model, *args, **{"reward_funcs": reward, **GENERATION, **options})
        trainer.processing_class.padding_side = "left"  # as it is loaded by TRL
        return trainer


A2PO = A2PORecipe(A2POTrainer, A2POConfig, prompts, has_reference=False)
train_a2po = A2PO.train
