"""Tiny GRPO and RLOO trainings in TRL, recorded step by step.

The policy generates a group of completions for each prompt and learns from their rewards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from tests.support.trl.dpo import OPTIONS, Run, assert_same, pairs, record, tokenizer, train_both
from tests.support.trl.online import writer

NAMES = {GRPOTrainer: "trl.GRPOTrainer", RLOOTrainer: "trl.RLOOTrainer"}
CONFIGS = {GMPOTrainer: GMPOConfig, GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}
GROUPS = dict(
    num_generations=4,
    max_completion_length=8,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=4,
    steps_per_generation=1,
)
AGAIN = dict(steps_per_generation=2, num_iterations=2, max_steps=4, learning_rate=0.5, epsilon=0.1)
"""Each batch is trained on twice, so that importance ratios differ from 1 and some are clipped."""
CLIPPED = {**AGAIN, "beta": 0.1}
SCORED_BEFORE = {"policy": 4, "old_policy": 2, "reference": 2}
"""The calls of such a training: two batches are scored before they are trained on twice."""
BEYOND_ROUNDING = 1e-4
"""Smallest `GroupRun.distance` of any training that is compared.

Rounding changes ratios and entropies by about 1e-6, and could decide about a token that is closer.
"""


def reward(completion_ids: list[list[int]], **columns) -> list[float]:
    """Below 1, since the rounding error of a loss is proportional to the rewards."""
    return [sum(ids) % 23 / 23 for ids in completion_ids]


def prompts(n: int = 16, seed: int = 0) -> list[dict[str, str]]:
    return [{"prompt": row["prompt"]} for row in pairs(n, seed)]


@dataclass
class GroupRun(Run):
    """The record of a training on groups of completions.

    Attributes:
        generated: ids of the prompts and of the completions of each generation.
        clipped: for each call of the loss, whether each ratio is above the bounds of clipping, or below.
        distance: the smallest distance of a ratio from a bound, or of an entropy from the quantile that is the bound.
    """

    generated: list[tuple[list[list[int]], list[list[int]]]] = field(default_factory=list)
    clipped: list[torch.Tensor] = field(default_factory=list)
    distance: float = math.inf


def recorded(trainer_class: type, run: GroupRun) -> type:
    """A subclass that records what it generates and which ratios are clipped."""

    class Recorded(trainer_class):
        def _generate(self, prompts):
            generated = super()._generate(prompts)
            run.generated.append(generated[:2])
            return generated

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.logps = scored[0].detach()
            return scored

        def get_high_entropy_mask(self, entropies, mask, threshold):
            values = entropies[mask.bool()].float()
            run.distance = min(run.distance, (values - values.quantile(threshold)).abs().min().item())
            return super().get_high_entropy_mask(entropies, mask, threshold)

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            mask = inputs["completion_mask"]
            if "old_logps" in inputs:
                ratios = ((self.logps * mask).sum(1) - inputs["old_logps"]).exp()
            elif "old_per_token_logps" not in inputs:
                return loss
            else:
                ratios = (self.logps - inputs["old_per_token_logps"]).exp()[mask.bool()]
            run.clipped.append((ratios > 1 + self.epsilon_high).int() - (ratios < 1 - self.epsilon_low).int())
            for bound in (1 + self.epsilon_high, 1 - self.epsilon_low):
                run.distance = min([run.distance, *(ratios - bound).abs().tolist()])
            return loss

    return Recorded


def build_group(
    directory: Path,
    model: PreTrainedModel,
    trainer_class: type = GRPOTrainer,
    *,
    reference: PreTrainedModel | Path | None = None,
    data: list[dict] | None = None,
    rewards: Callable = reward,
    reward_model: Callable[[], PreTrainedModel] | None = None,
    evaluate: int = 0,
    peft_config: PeftConfig | None = None,
    rollout_func: Callable | None = None,
    callbacks: list[TrainerCallback] | None = None,
    **overrides,
) -> GRPOTrainer | RLOOTrainer:
    """Creates a trainer. `overrides` are fields of its config.

    `reward_model` makes a model that scores completions in the place of `rewards`.

    The trainer loads its reference from where its policy comes from: the folder `reference`, or one to which the model
    `reference` is saved.
    """
    if isinstance(reference, PreTrainedModel):
        reference.save_pretrained(directory / "reference")
        reference = directory / "reference"
    if reference is not None:
        model.config._name_or_path = str(reference)
    config = next(config for kind, config in CONFIGS.items() if issubclass(trainer_class, kind))
    options = {"output_dir": str(directory / "out"), **OPTIONS, **GROUPS, **overrides}
    return trainer_class(
        model=model,
        reward_funcs=rewards if reward_model is None else reward_model(),
        reward_processing_classes=None if reward_model is None else tokenizer(),
        args=config(**options),
        train_dataset=Dataset.from_list(data or prompts()),
        eval_dataset=Dataset.from_list(prompts(evaluate, seed=1)) if evaluate else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
        callbacks=callbacks,
        **({} if rollout_func is None else {"rollout_func": rollout_func}),
    )


def train_group(
    directory: Path, model: PreTrainedModel, trainer_class: type = GRPOTrainer, evaluate: int = 0, **options
) -> GroupRun:
    """Runs a short training with the patches that are active. `options` are arguments of `build_group`."""
    run = GroupRun([])
    make = functools.partial(build_group, directory, model, recorded(trainer_class, run), evaluate=evaluate, **options)
    trained = record(make, evaluate=evaluate > 0)
    return replace(run, **vars(trained))


def train_both_groups(
    directory: Path,
    trainer_class: type = GRPOTrainer,
    kind: str = "llama",
    tiny: dict | None = None,
    reference: bool = True,
    prepare: Callable = lambda model: model,
    **options,
) -> list[GroupRun]:
    """Trains stock, then patched, from the same initial weights.

    `prepare` is applied to the policy before a trainer is created with it.
    """

    def build(kind: str, seed: int, **config) -> PreTrainedModel:
        return writer(seed, kind, **config)

    def train(directory: Path, model: PreTrainedModel, reference: PreTrainedModel | None, **options) -> GroupRun:
        return train_group(directory, prepare(model), trainer_class, reference=reference, **options)

    name = next(name for kind, name in NAMES.items() if issubclass(trainer_class, kind))
    return train_both(directory, kind, tiny, reference, trainer=name, train=train, build=build, **options)


def assert_same_groups(stock: GroupRun, patched: GroupRun) -> None:
    """Asserts equal completions, equal decisions of clipping, and equal training on them."""
    assert stock.generated == patched.generated
    assert not stock.calls
    assert stock.distance > BEYOND_ROUNDING, "rounding decides what is trained on: choose another seed"
    assert_same(stock, patched)
    assert len(stock.clipped) == len(patched.clipped)
    assert all(map(torch.equal, stock.clipped, patched.clipped))
