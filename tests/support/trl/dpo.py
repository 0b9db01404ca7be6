"""Tiny DPO trainings in TRL, recorded step by step, and assertions that two of them are equal."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset, IterableDataset, load_from_disk
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainerCallback
from trl import DPOConfig, DPOTrainer

import fastdpo
from fastdpo import packing
from fastdpo.integrations.options import PatchOptions
from fastdpo.models import batch
from fastdpo.packing import Layout
from tests.support.comparison import assert_fused as assert_fused  # for the tests of trainings
from tests.support.comparison import assert_same as assert_same
from tests.support.comparison import assert_same_bits as assert_same_bits
from tests.support.comparison import double, tiny
from tests.support.recorded_calls import recorded_calls
from tests.support.words import word_tokenizer
from tests.support.workers.processes import run_ranks

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(94))]
NOT_NUMBERS_OF_TRAINING = ("runtime", "per_second", "epoch", "flos", "step_time", "preparation_time")


def tokenizer() -> PreTrainedTokenizerFast:
    """Like those of causal LMs, it returns no token types, which those of transformers 4 do by default."""
    return word_tokenizer(WORDS, model_input_names=["input_ids", "attention_mask"])


def pairs(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Ragged preference pairs. Some answers share a prefix, and some are one word long."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join(f"w{rng.randrange(94)}" for _ in range(rng.randint(low, high)))

    rows = [{"prompt": text(1, 14) + " ", "chosen": text(1, 11), "rejected": text(1, 11)} for _ in range(n)]
    rows[0]["rejected"] = rows[0]["chosen"] + " w1 w2"  # a prefix, except for the end token
    rows[1]["chosen"], rows[1]["rejected"] = "w3 w4 w5", "w3 w4 w6 w7"  # a common prefix
    return rows


ACROSS_12 = ((1, 20, 30), (11, 1, 25), (5, 3, 2), (14, 13, 12), (30, 4, 40), (2, 40, 1), (10, 12, 11), (8, 4, 3))
"""Lengths of prompt, chosen and rejected of pairs that are shorter and longer than 12 tokens."""


def long_pairs(lengths: tuple[tuple[int, int, int], ...] = ACROSS_12) -> list[dict[str, str]]:
    """Pairs of the given lengths, whose truncation cuts answers and (entire) prompts."""
    rng = random.Random(3)

    def words(n: int) -> str:
        return " ".join(f"w{rng.randrange(94)}" for _ in range(n))

    return [dict(prompt=words(p) + " ", chosen=words(c), rejected=words(r)) for p, c, r in lengths]


def on_disk(rows: list[dict[str, str]], directory: Path) -> Dataset:
    """Saves rows to a directory and loads them from there.

    Precomputed values are cached next to a dataset on disk, so each run needs its own copy.
    """
    shutil.copytree(_saved(json.dumps(rows)).name, directory, dirs_exist_ok=True)
    return load_from_disk(directory)


@functools.cache
def _saved(rows: str) -> tempfile.TemporaryDirectory:
    """The directory of a dataset of these rows, in JSON. No one writes to it."""
    directory = tempfile.TemporaryDirectory(prefix="fastdpo-tests-")
    Dataset.from_list(json.loads(rows)).save_to_disk(directory.name)
    return directory


def dataset(n: int, directory: Path, seed: int = 0) -> Dataset:
    return on_disk(pairs(n, seed), directory)


def dataset_for(options: Mapping[str, Any], rows: list[dict], directory: Path) -> Dataset:
    """A dataset of rows for a training with `options`: in memory, or on disk if the training precomputes values."""
    return on_disk(rows, directory) if options.get("precompute_ref_log_probs") else Dataset.from_list(rows)


def tiny_model(kind: str = "llama", seed: int = 0, **config) -> PreTrainedModel:
    """`comparison.tiny` with the vocabulary of `WORDS`."""
    return tiny(AutoModelForCausalLM, kind, len(WORDS), seed, **config)


@dataclass
class Run:
    """The record of a training.

    Attributes:
        logs: the numbers logged in each step and in evaluations.
        gradients: the gradient of every parameter before each optimizer step.
        calls: fastdpo's counters: a map from (kind, path) to the number of calls.
        steps: the number of optimizer steps.
        in_float64: repeats the training in float64 with the same initial weights and data.
    """

    logs: list[dict[str, float]]
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    calls: Counter = field(default_factory=Counter)
    steps: int = 0
    in_float64: Callable[[], Run] | None = None


class Gradients(TrainerCallback):
    """Appends the gradients before each optimizer step to a list."""

    def __init__(self, gradients: list[dict[str, torch.Tensor]]):
        self.gradients = gradients

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.requires_grad and p.grad is not None})


OPTIONS = dict(
    bf16=False,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=1,
    optim="sgd",  # Adam's normalized steps would amplify rounding errors
    learning_rate=0.01,
    lr_scheduler_type="constant",
    max_grad_norm=1e9,
    per_device_train_batch_size=4,
    max_steps=3,
    gradient_checkpointing=False,
)
"""Training arguments for all of TRL's trainers."""


LORA = dict(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)


def adapter(**options) -> dict:
    """Arguments of `train` for a LoRA training, with `options` of `LoraConfig`."""
    return dict(reference=False, peft_config=LoraConfig(**{**LORA, **options}))


def trained_adapter(model: PreTrainedModel) -> PeftModel:
    """Adds an adapter whose weights are not zero."""
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(**LORA))


@dataclass(frozen=True)
class Recipe:
    """How to create a trainer of TRL with a tiny dataset, and to train with it.

    Attributes:
        trainer_class: the trainer.
        config_class: the class of its arguments.
        rows: makes a number of rows, for a seed.
        has_reference: whether the trainer takes a reference model.
    """

    trainer_class: type
    config_class: type
    rows: Callable[..., list[dict]]
    has_reference: bool = True

    def for_harness(self) -> dict[str, Any]:
        """What the description of a trainer begins with (see `tests.contract.harness.Harness`)."""
        roles = ("policy", "reference") if self.has_reference else ("policy",)
        return dict(
            name=f"trl.{self.trainer_class.__name__}",
            calls=dict.fromkeys(roles, 1),
            train=self.train,
            build=self.build,
            models=lambda: [tiny_model(seed=seed) for seed in range(len(roles))],
        )

    def config(self, directory: Path, **overrides) -> Any:
        fields = {"output_dir": str(directory / "out"), **OPTIONS, "per_device_eval_batch_size": 4, **overrides}
        return self.config_class(**fields)

    def build(
        self,
        directory: Path,
        model: PreTrainedModel | str,
        reference: PreTrainedModel | None = None,
        *,
        data: list[dict] | Dataset | IterableDataset | Callable[..., list[dict]] | None = None,
        evaluate: int = 0,
        trainer_class: type | None = None,
        **options,
    ) -> Any:
        """Creates a trainer on `data` (default: 16 of its rows), or on what `data` makes, as `rows` does.

        `evaluate` is a number of other rows for evaluations. `options` are fields of its arguments, and arguments of
        the trainer.
        """
        names = {field.name for field in fields(self.config_class)}
        of_config = {name: options.pop(name) for name in [*options] if name in names}
        rows = data if callable(data) else self.rows
        if not isinstance(data, Dataset | IterableDataset):
            given = rows(16) if data is None or callable(data) else data
            data = dataset_for(of_config, given, directory / "train")
        other = dataset_for(of_config, rows(evaluate, seed=1), directory / "eval") if evaluate else None
        return (trainer_class or self.trainer_class)(
            model=model,
            args=self.config(directory, **of_config),
            train_dataset=data,
            eval_dataset=other,
            processing_class=tokenizer(),
            **({"ref_model": reference} if self.has_reference else {}),
            **options,
        )

    def train(
        self,
        directory: Path,
        model: PreTrainedModel | str,
        reference: PreTrainedModel | None = None,
        *,
        evaluate: int = 0,
        only_evaluate: bool = False,
        callbacks: Sequence[TrainerCallback] = (),
        **options,
    ) -> Run:
        """Runs a short training with the patches that are active. `options` are arguments of `build`.

        The rows to `evaluate` are evaluated after the training, or instead of it if `only_evaluate`.
        """

        others = callbacks

        def make(callbacks: list[TrainerCallback]) -> Trainer:
            both = [*callbacks, *others]
            return self.build(directory, model, reference, evaluate=evaluate, callbacks=both, **options)

        return record(make, evaluate=evaluate > 0, only_evaluate=only_evaluate)


DPO = Recipe(DPOTrainer, DPOConfig, pairs)
config, train = DPO.config, DPO.train


def build(
    directory: Path, model: PreTrainedModel, reference: PreTrainedModel | None, n: int = 4, **options
) -> DPOTrainer:
    """Creates a trainer on n of `pairs`. `options` are arguments of `Recipe.build`."""
    return DPO.build(directory, model, reference, data=pairs(n), **options)


def record(make: Callable[..., Trainer], *, evaluate: bool = False, only_evaluate: bool = False) -> Run:
    """Creates a trainer by `make(callbacks=...)`, trains or evaluates with it, and returns the record."""
    run = Run([])
    before = Counter(fastdpo.calls)
    with mock.patch.dict(os.environ):  # `torch_compile` of one trainer would compile all later ones by a variable
        trainer = make(callbacks=[Gradients(run.gradients)])
        if not only_evaluate:
            trainer.train()
        if evaluate:
            trainer.evaluate()
    run.steps = trainer.state.global_step
    run.logs = [numbers(log) for log in trainer.state.log_history]
    run.calls = Counter({key[1:]: n for key, n in (fastdpo.calls - before).items()})
    return run


def train_both(
    directory: Path,
    kind: str = "llama",
    tiny=None,
    reference: bool = True,
    prepare=lambda model: model,
    trainer: str = "trl.DPOTrainer",
    train: Callable[..., Run] = train,
    build: Callable[..., PreTrainedModel] = tiny_model,
    **options,
) -> list[Run]:
    """Trains stock, then patched, with options of `patch` that are among the others, from the same initial weights.

    `build` makes each model of its kind, a seed and the entries of `tiny`. `prepare` is applied to
    it before a trainer is created with it. `train` is called with a directory, policy, reference
    and the options. Only the patched training is compiled: it changes no value, and takes long.
    """
    of_patch = {name: options.pop(name) for name in [*options] if name in PatchOptions._fields}
    not_compiled = {name: value for name, value in options.items() if not name.startswith("torch_compile")}

    def once(name: str, options: dict, cast: Callable = lambda model: model) -> Run:
        models = [cast(prepare(build(kind, seed, **(tiny or {})))) for seed in range(1 + reference)]
        return train(directory / name, models[0], models[1] if reference else None, **options)

    stock = once("stock", not_compiled)
    stock.in_float64 = functools.partial(once, "float64", not_compiled, double)
    with fastdpo.patched(trainer, **of_patch):
        return [stock, once("patched", options)]


def mean_logit(prediction) -> dict[str, float]:
    """A function for `compute_metrics`, which needs the logits of an evaluation."""
    assert prediction.predictions.shape[-1] == len(WORDS)
    return {"mean_logit": float(prediction.predictions.mean())}


def recorded_layouts(monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    """A list to which the layout of each following call is appended."""
    return recorded_calls(monkeypatch, batch, "layout_of")


def recorded_packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the number of rows is appended whenever a batch is packed in this process."""
    return recorded_calls(monkeypatch, packing, "make_layout", lambda layout, ids, *args, **options: len(ids))


def run_two_ranks(kind: str, directory: Path) -> list[dict]:
    """Runs `collectives.train_rank` on two ranks and returns the result of each."""
    from tests.support.workers import collectives  # not at the top: it imports this module

    run_ranks(2, collectives.train_rank, directory / kind, kind)
    return [torch.load(directory / kind / f"rank{rank}of2.pt") for rank in range(2)]


def numbers(log: dict) -> dict[str, float]:
    """The numbers of a log that depend on the training alone, such as losses; not run times."""
    named = ((k, v) for k, v in log.items() if isinstance(v, float))
    return {k: v for k, v in named if not any(word in k for word in NOT_NUMBERS_OF_TRAINING)}


def assert_same_error(directory: Path, build: Callable[[int], PreTrainedModel], error: type[Exception]) -> None:
    """Asserts that a training of a policy and a reference raises the same error, stock and patched.

    `build` makes a model of a seed.
    """
    messages = []
    for patch in (contextlib.nullcontext, fastdpo.patched):
        with pytest.raises(error) as raised, patch():
            train(directory / patch.__name__, build(0), build(1), max_steps=1)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
