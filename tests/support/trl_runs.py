"""Tiny DPO trainings in TRL, recorded step by step, and what makes two of them the same training."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from comparison import EPS, SIZES, assert_same_training, differences_of_logs, double, largest, sharpen
from datasets import Dataset, IterableDataset, load_from_disk
from peft import LoraConfig
from rank_processes import run_ranks
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer

import fastdpo

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(94))]
NOT_NUMBERS_OF_TRAINING = ("runtime", "per_second", "epoch", "flos")


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word. Its special tokens are no prefixes of words."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def pairs(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Ragged preference pairs: among them answers that begin alike, and answers that are one word long."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join(f"w{rng.randrange(94)}" for _ in range(rng.randint(low, high)))

    rows = [{"prompt": text(1, 14) + " ", "chosen": text(1, 11), "rejected": text(1, 11)} for _ in range(n)]
    rows[0]["rejected"] = rows[0]["chosen"] + " w1 w2"  # one a prefix of the other, but for the end token
    rows[1]["chosen"], rows[1]["rejected"] = "w3 w4 w5", "w3 w4 w6 w7"  # a common beginning
    return rows


def on_disk(rows: list[dict[str, str]], directory: Path) -> Dataset:
    """A data set on disk that only this run uses: precomputed values are cached next to it."""
    Dataset.from_list(rows).save_to_disk(directory)
    return load_from_disk(directory)


def dataset(n: int, directory: Path, seed: int = 0) -> Dataset:
    return on_disk(pairs(n, seed), directory)


def tiny_model(kind: str = "llama", seed: int = 0, without: tuple[str, ...] = (), **config) -> PreTrainedModel:
    sizes = {**SIZES, "vocab_size": len(WORDS), "head_dim": 8}
    torch.manual_seed(seed)
    sizes = {name: size for name, size in sizes.items() if name not in without}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **config}))
    sharpen(model)
    return model


@dataclass
class Run:
    """Record of a training.

    Attributes:
        logs: every number logged in each step, and those of evaluations.
        gradients: of every parameter, before each optimizer step.
        calls: fastdpo's counters: (kind, path) to calls.
        steps: of the optimizer.
        in_float64: trains again in float64, from the same start and on the same data.
    """

    logs: list[dict[str, float]]
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    calls: Counter = field(default_factory=Counter)
    steps: int = 0
    in_float64: Callable[[], Run] | None = None


class Gradients(TrainerCallback):
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
    optim="sgd",  # Adam's normalised steps would blow rounding up
    learning_rate=0.01,
    lr_scheduler_type="constant",
    max_grad_norm=1e9,
    per_device_train_batch_size=4,
    max_steps=3,
    gradient_checkpointing=False,
)
"""Options of every trainer of TRL."""


LORA = dict(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)


def adapter(**options) -> dict:
    """Options of a training with LoRA."""
    return dict(reference=False, peft_config=LoraConfig(**{**LORA, **options}))


def config(directory: Path, **overrides) -> DPOConfig:
    return DPOConfig(**{"output_dir": str(directory / "out"), **OPTIONS, "per_device_eval_batch_size": 4, **overrides})


def build(
    directory: Path,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    n: int = 4,
    trainer_class: type[DPOTrainer] = DPOTrainer,
    **overrides,
) -> DPOTrainer:
    """A trainer on n of `pairs`. `overrides` are fields of `DPOConfig`."""
    return trainer_class(
        model=model,
        ref_model=reference,
        args=config(directory, **overrides),
        train_dataset=dataset(n, directory / "train"),
        processing_class=tokenizer(),
    )


def train(
    directory: Path,
    model: PreTrainedModel | str,
    reference: PreTrainedModel | None,
    *,
    peft_config=None,
    data: list[dict[str, str]] | Dataset | IterableDataset | None = None,
    evaluate: int = 0,
    only_evaluate: bool = False,
    trainer_class: type[DPOTrainer] = DPOTrainer,
    data_collator: Callable | None = None,
    compute_metrics: Callable | None = None,
    **overrides,
) -> Run:
    """A short DPO training on `data` (default: `pairs`), with whatever is patched at the moment.

    `evaluate` pairs are evaluated after it, or instead of it. `overrides` are fields of `DPOConfig`.
    """
    run = Run([])
    if not isinstance(data, Dataset | IterableDataset):
        data = on_disk(data or pairs(16), directory / "train")
    before = Counter(fastdpo.calls)
    trainer = trainer_class(
        model=model,
        ref_model=reference,
        args=config(directory, **overrides),
        train_dataset=data,
        eval_dataset=dataset(evaluate, directory / "eval", seed=1) if evaluate else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
        callbacks=[Gradients(run.gradients)],
    )
    if not only_evaluate:
        trainer.train()
    if evaluate:
        trainer.evaluate()
    run.steps = trainer.state.global_step
    run.logs = [numbers(log) for log in trainer.state.log_history]
    run.calls = Counter({key[1:]: n for key, n in (fastdpo.calls - before).items()})
    return run


def train_both(
    directory: Path, kind: str = "llama", tiny=None, reference: bool = True, prepare=lambda model: model, **options
) -> list[Run]:
    """Trains stock, then patched, from the same start.

    `prepare` is what is done with each model before a trainer gets it.
    """

    def once(name: str, cast: Callable = lambda model: model) -> Run:
        models = [cast(prepare(tiny_model(kind, seed, **(tiny or {})))) for seed in range(1 + reference)]
        return train(directory / name, models[0], models[1] if reference else None, **options)

    stock = once("stock")
    stock.in_float64 = functools.partial(once, "float64", double)
    with fastdpo.patched("trl.DPOTrainer"):
        return [stock, once("patched")]


def run_with_oldest(worker: Path, directory: Path) -> None:
    """Runs a script in a process that has the oldest TRL that is supported; skips the test where there is none."""
    oldest = os.environ.get("OLDEST_TRL")
    if oldest is None:
        pytest.skip("OLDEST_TRL must be the folder of trl 1.15.0; `make test` installs and names it")
    done = subprocess.run(
        [sys.executable, str(worker), str(directory)],
        env={**os.environ, "PYTHONPATH": oldest, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def run_two_ranks(kind: str, directory: Path) -> list[dict]:
    """Results of `trl_ranks_worker.train_rank`, one of each rank."""
    import trl_ranks_worker  # which imports this module

    run_ranks(2, trl_ranks_worker.train_rank, directory / kind, kind)
    return [torch.load(directory / kind / f"rank{rank}of2.pt") for rank in range(2)]


def numbers(log: dict) -> dict[str, float]:
    """Those of a log that a training makes."""
    named = ((k, v) for k, v in log.items() if isinstance(v, float))
    return {k: v for k, v in named if not any(word in k for word in NOT_NUMBERS_OF_TRAINING)}


def assert_same(stock: Run, patched: Run) -> None:
    """Every number of every log and every parameter's gradient of every step agree, but for rounding."""
    assert len(stock.gradients) == len(patched.gradients) == stock.steps == patched.steps
    assert_same_training(stock, patched, stock.in_float64)


def assert_same_bits(stock: Run, patched: Run) -> None:
    """Losses and gradients to the last bit. TRL's metrics are the same but for how their means are rounded."""
    assert largest(differences_of_logs(stock.logs, patched.logs, relative=8 * EPS, absolute=EPS)).size <= 1
    assert len(stock.gradients) == len(patched.gradients) == stock.steps == patched.steps
    for step, (a, b) in enumerate(zip(stock.logs, patched.logs, strict=True)):
        for name in a.keys() & {"loss", "eval_loss", "train_loss", "grad_norm"}:
            assert a[name] == b[name], f"step {step}: {name} {a[name]} {b[name]}"
    for step, (a, b) in enumerate(zip(stock.gradients, patched.gradients, strict=True)):
        assert a.keys() == b.keys(), f"step {step} has gradients of other parameters"
        for name in a:
            assert torch.equal(a[name], b[name]), f"step {step}: gradient of {name} differs"


def assert_fused(run: Run, **expected: int) -> None:
    """Exactly these calls ran, all of them fused: the test that a path is not silently off."""
    assert run.calls == Counter({(kind, "fused"): n for kind, n in expected.items() if n})
