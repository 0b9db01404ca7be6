"""Tiny online DPO trainings in TRL, recorded step by step.

The policy generates two completions for each prompt and learns to prefer the one with the higher
reward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, TrainerCallback

from tests.support.comparison import double

try:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
except ModuleNotFoundError:  # older TRL
    from trl import OnlineDPOConfig, OnlineDPOTrainer
import fastdpo
from tests.support.trl.dpo import OPTIONS, WORDS, Run, assert_fused, assert_same, pairs, record, tiny_model, tokenizer

SUMS_OVER_PADDING = {f"objective/{name}" for name in ("kl", "entropy", "non_score_reward", "rlhf_reward")}
"""Metrics that stock TRL sums over the padding of completions as well."""


def writer(seed: int = 0, kind: str = "llama", **config) -> PreTrainedModel:
    """A tiny model with 20 end-of-sequence tokens.

    Some of its completions end early, and some reach the maximum length.
    """
    model = tiny_model(kind, seed, **config)
    model.generation_config.eos_token_id = list(range(1, 21))
    return model


def reward(completion_ids: list[list[int]], **columns) -> list[float]:
    return [float(sum(ids) % 23) for ids in completion_ids]


def reward_model() -> PreTrainedModel:
    torch.manual_seed(2)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = AutoConfig.for_model("llama", vocab_size=len(WORDS), num_labels=1, pad_token_id=0, **sizes)
    config.name_or_path = "rewards"
    return AutoModelForSequenceClassification.from_config(config)


@dataclass
class OnlineRun(Run):
    """The record of an online training.

    Attributes:
        batches: ids and mask of the prompts and of the completions that each step scored.
    """

    batches: list[tuple[torch.Tensor, ...]] = field(default_factory=list)


def masked(trainer_class: type[OnlineDPOTrainer]) -> type[OnlineDPOTrainer]:
    """A subclass that zeroes log-probs on the padding of completions, so that sums exclude it."""

    class Masked(trainer_class):
        def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None):
            inputs = (prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs)
            return super()._forward(model, *inputs) * completion_mask

    return Masked


def config(directory: Path, **overrides) -> OnlineDPOConfig:
    return OnlineDPOConfig(**{"output_dir": str(directory / "out"), **OPTIONS, "max_new_tokens": 8, **overrides})


def build(
    directory: Path,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    trainer_class: type[OnlineDPOTrainer] = OnlineDPOTrainer,
    *,
    rewards: Callable = reward,
    data: list[dict] | None = None,
    peft_config: PeftConfig | None = None,
    callbacks: list[TrainerCallback] | None = None,
    **overrides,
) -> OnlineDPOTrainer:
    """Creates an online trainer.

    `rewards` is a reward function, or a factory of reward models, which a trainer modifies.
    `overrides` are fields of `OnlineDPOConfig`.
    """
    functions = [rewards] if rewards is reward else rewards()
    functions = functions if isinstance(functions, list) else [functions]
    return trainer_class(
        model=model,
        ref_model=reference,
        reward_funcs=functions,
        reward_processing_classes=[tokenizer() if isinstance(f, PreTrainedModel) else None for f in functions],
        args=config(directory, **overrides),
        train_dataset=Dataset.from_list(data or [{"prompt": row["prompt"]} for row in pairs(16)]),
        processing_class=tokenizer(),
        peft_config=peft_config,
        callbacks=callbacks,
    )


def train_online(
    directory: Path,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    trainer_class: type[OnlineDPOTrainer] = OnlineDPOTrainer,
    **options,
) -> OnlineRun:
    """Runs a short online training with the patches that are active.

    `options` are arguments of `build`.
    """
    run, losses = OnlineRun([]), []

    class Recorded(trainer_class):
        def training_step(self, *args, **kwargs):
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1].clone()  # the trainer modifies it in place

        def _generate(self, *args):
            generated = super()._generate(*args)
            run.batches.append(generated[:4])
            return generated

    run = replace(run, **vars(record(functools.partial(build, directory, model, reference, Recorded, **options))))
    for i, loss in enumerate(torch.stack(losses).view(run.steps, -1).sum(1).tolist()):
        run.logs[i]["loss"] = loss  # TRL rounds the logged loss to four digits
    return run


def assert_same_online(stock: OnlineRun, patched: OnlineRun, except_for: set[str] = frozenset()) -> None:
    """Asserts equal completions, and equal training on them except for the named metrics."""
    for step, (a, b) in enumerate(zip(stock.batches, patched.batches, strict=True)):
        assert all(map(torch.equal, a, b)), f"step {step} has different completions"
    assert_same(without(except_for, stock), without(except_for, patched))


def without(metrics: set[str], run: OnlineRun) -> OnlineRun:
    logs = [{name: x for name, x in log.items() if name not in metrics} for log in run.logs]
    again = run.in_float64
    return replace(run, logs=logs, in_float64=None if again is None else lambda: without(metrics, again()))


def train_three(
    directory: Path,
    kind: str = "llama",
    tiny=None,
    reference: bool = True,
    prepare=lambda model: model,
    trainer_class: type[OnlineDPOTrainer] = OnlineDPOTrainer,
    **options,
) -> list[OnlineRun]:
    """Trains stock, `masked` stock and patched from the same initial weights.

    `prepare` is applied to each model before a trainer is created with it.
    """

    def once(name: str, trainer_class=trainer_class, cast=lambda model: model) -> OnlineRun:
        models = [cast(prepare(writer(seed, kind, **(tiny or {})))) for seed in range(1 + reference)]
        return train_online(directory / name, models[0], models[-1] if reference else None, trainer_class, **options)

    classes = {"stock": trainer_class, "masked": masked(trainer_class)}
    runs = [once(name, trainer_class) for name, trainer_class in classes.items()]
    for run, (name, trainer_class) in zip(runs, classes.items(), strict=True):
        run.in_float64 = functools.partial(once, f"{name} in float64", trainer_class, double)
    with fastdpo.patched("trl.OnlineDPOTrainer"):
        return [*runs, once("patched")]


def assert_all_same(stock: OnlineRun, masked_stock: OnlineRun, patched: OnlineRun) -> None:
    """Asserts that patched equals masked stock, and stock up to `SUMS_OVER_PADDING`."""
    assert not stock.calls
    assert_same_online(masked_stock, patched)
    assert_same_online(stock, patched, except_for=SUMS_OVER_PADDING)


FOR_HARNESS: dict[str, Any] = dict(
    name="trl.OnlineDPOTrainer",
    calls=dict(policy=1, reference=1),
    train=train_online,
    build=build,
    both=train_three,
    models=lambda: [writer(seed) for seed in range(2)],
    assert_same=assert_all_same,
)
"""What the descriptions of the trainer begin with (see `tests.contract.harness.Harness`)."""


def assert_option_trains_alike(directory: Path, **options) -> None:
    """Asserts that two steps with an option of `train_three` are fused and equal stock's."""
    runs = train_three(directory, max_steps=2, **options)
    calls = 2 * options.get("gradient_accumulation_steps", 1)
    assert_fused(runs[-1], policy=calls, reference=calls, reward=calls if "rewards" in options else 0)
    assert_all_same(*runs)
