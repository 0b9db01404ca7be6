"""Tiny trainings in OpenRLHF with its real trainer, actor and dataset, recorded step by step.

`DeepspeedStrategy` needs CUDA. `Strategy` replaces it on a CPU, with a torch optimizer or
DeepSpeed's engine.
"""

from __future__ import annotations

import os
import random
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from openrlhf.datasets import RewardDataset
from openrlhf.models import Actor, get_llm_for_sequence_regression
from openrlhf.trainer.dpo_trainer import DPOTrainer
from openrlhf.trainer.rm_trainer import RewardModelTrainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import fastdpo
from tests.support import ROOT
from tests.support.comparison import assert_same_training, tiny
from tests.support.workers.processes import run_launcher

HERE = Path(__file__).parent
VOCABULARY = 160
RATE = 0.01


def rows(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Ragged preference pairs. Prompts end in a space, and answers begin with a letter."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join("".join(rng.choices("abcdef", k=rng.randint(1, 4))) for _ in range(rng.randint(low, high)))

    return [{"prompt": text(1, 9) + " ", "chosen": text(1, 8), "rejected": text(1, 8)} for _ in range(n)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which merges a space with the word that follows it.

    The last token of a tokenized prompt is therefore not in the tokenized rows.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [" ".join(row.values()) for row in rows(200, seed=9)]
    alphabet = sorted({letter for text in texts for letter in text.replace(" ", "Ġ")})
    special = ["<pad>", "<eos>"]
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")


def checkpoint(directory: Path, kind: str = "llama", seed: int = 0, without: tuple[str, ...] = (), **config) -> Path:
    """Saves a tiny model and returns its path, from which actors load it."""
    model = tiny(AutoModelForCausalLM, kind, VOCABULARY, seed, ("head_dim", *without), **config)
    path = directory / f"{kind}{seed}"
    model.save_pretrained(path)
    return path


class Strategy:
    """The methods and fields of a strategy that the trainers use.

    Attributes:
        gradients: the gradient of every parameter before each optimizer step; empty with DeepSpeed.
    """

    ring_attn_group = None
    accumulated_gradient = 1

    def __init__(self, packing_samples: bool = False, **loss: Any) -> None:
        model = dict(label_smoothing=0.0, ipo_enable=False, aux_loss_coef=0.0, nll_loss_coef=0.0)
        model |= dict(margin_loss_enable=False, compute_fp32_loss_enable=False) | loss
        self.args = Namespace(
            model=Namespace(**model),
            ds=Namespace(packing_samples=packing_samples),
            data=Namespace(prompt_key="prompt", chosen_key="chosen", rejected_key="rejected"),
            logger=Namespace(wandb=Namespace(key=None), tensorboard_dir=None, logging_steps=1),
            eval=Namespace(steps=-1),
            ckpt=Namespace(save_steps=-1),
            train=Namespace(batch_size=4),
        )
        self.gradients: list[dict[str, torch.Tensor]] = []

    def is_rank_0(self) -> bool:
        return True

    def backward(self, loss: torch.Tensor, model: Actor, optimizer: Any) -> None:
        inner = model.model if isinstance(model, Actor) else model
        inner.backward(loss) if hasattr(inner, "backward") else loss.backward()

    def optimizer_step(self, optimizer: Any, model: Actor, scheduler: Any) -> None:
        inner = model.model if isinstance(model, Actor) else model
        if hasattr(inner, "step"):
            inner.step()
            return
        named = model.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()

    def get_grad_norm(self, model: Actor) -> float:
        return 0.0

    def all_reduce(self, data: dict[str, float]) -> dict[str, float]:
        return data

    def all_gather(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def print(self, *messages: Any) -> None:
        pass

    def _unwrap_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model


class _Recording:
    """A trainer that records its logs."""

    def save_logs_and_checkpoints(self, args, global_step, step_bar, logs_dict=None, client_states=None):
        vars(self).setdefault("logs", []).append(logs_dict)
        super().save_logs_and_checkpoints(args, global_step, step_bar, logs_dict, client_states)

    def evaluate(self, eval_dataloader, steps=0):
        reduce = self.strategy.all_reduce
        self.strategy.all_reduce = lambda logs: vars(self).setdefault("logs", []).append(logs) or logs
        try:
            super().evaluate(eval_dataloader, steps)
        finally:
            self.strategy.all_reduce = reduce


class Recorded(_Recording, DPOTrainer):
    """Records a DPO training."""


class RecordedRewards(_Recording, RewardModelTrainer):
    """Records a training of a reward model."""


class Run:
    """Logs of each step and of evaluations, gradients of each step, and fastdpo's counters.

    Attributes:
        in_float64: repeats the training in float64 with the same initial weights and data.
    """

    in_float64: Callable[[], Run] | None = None

    def __init__(self, trainer: _Recording, calls: Counter) -> None:
        self.logs, self.gradients = trainer.logs, trainer.strategy.gradients
        self.calls = Counter({key[1:]: n for key, n in calls.items()})


def actor(
    path: Path, packing_samples: bool, attention: str = "sdpa", cast: Callable = torch.nn.Module.float, **options: Any
) -> Actor:
    """Loads an actor in float32, so that runs can be compared; OpenRLHF's default is bfloat16."""
    return cast(Actor(str(path), attn_implementation=attention, packing_samples=packing_samples, **options))


def loader(
    strategy: Strategy,
    data: list[dict[str, Any]],
    batch: int = 4,
    is_dpo: bool = True,
    encode: PreTrainedTokenizerFast | None = None,
) -> DataLoader:
    """Batches of a data set. `encode` is `tokenizer()` by default."""
    whole = RewardDataset(
        Dataset.from_list(data), encode or tokenizer(), 64, strategy, is_dpo=is_dpo, num_processors=None
    )
    return DataLoader(whole, batch_size=batch, collate_fn=whole.collate_fn)


def train(
    policy: Path,
    reference: Path,
    strategy: Strategy,
    evaluate: int = 0,
    trainer_class: type[Recorded] = Recorded,
    attention: str = "sdpa",
    epochs: int = 1,
    data: list[dict[str, str]] | None = None,
    batch: int = 4,
    cast: Callable = torch.nn.Module.float,
    **options: Any,
) -> Run:
    """Runs a short training on `data` (default: 12 of `rows`) with the patches that are active.

    `evaluate` is a number of rows that are evaluated after each epoch. `cast` sets the precision of
    the actors. `options` are arguments of `Actor`.
    """
    before = Counter(fastdpo.calls)
    packing = strategy.args.ds.packing_samples
    torch.manual_seed(0)  # adapters
    models = actor(policy, packing, attention, cast, **options), actor(reference, packing, attention, cast)
    optimizer = torch.optim.SGD([p for p in models[0].parameters() if p.requires_grad], lr=RATE)
    trainer = trainer_class(
        *models,
        strategy,
        tokenizer(),
        optimizer,
        loader(strategy, data or rows(12), batch),
        loader(strategy, rows(evaluate, seed=1)) if evaluate else None,
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        beta=0.1,
        max_epochs=epochs,
    )
    trainer.fit(strategy.args)
    return Run(trainer, fastdpo.calls - before)


def reward_model(path: Path, **options: Any) -> PreTrainedModel:
    """A reward model with the backbone of a checkpoint. `options` are those of `get_llm_for_sequence_regression`."""
    torch.manual_seed(0)  # head and adapters
    options = dict(attn_implementation="sdpa") | options
    return get_llm_for_sequence_regression(str(path), "reward", init_value_head=True, **options)


def train_rewards(
    path: Path,
    strategy: Strategy,
    evaluate: int = 0,
    trainer_class: type[RecordedRewards] = RecordedRewards,
    padding: str = "<pad>",
    loss: str = "sigmoid",
    batch: int = 4,
    checkpointing: bool = False,
    cast: Callable = torch.nn.Module.float,
    **options: Any,
) -> Run:
    """Runs a short training of a reward model, as `train` does.

    `padding` is the token of padding. `options` are arguments of `get_llm_for_sequence_regression`.
    """
    before = Counter(fastdpo.calls)
    model = cast(reward_model(path, packing_samples=strategy.args.ds.packing_samples, **options))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    encode = tokenizer()
    encode.pad_token = padding
    model.config.pad_token_id = encode.pad_token_id
    pairs = [{**row, "margin": 0.1 * i} for i, row in enumerate(rows(12))]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    trainer = trainer_class(
        model,
        strategy,
        optimizer,
        loader(strategy, pairs, batch, is_dpo=False, encode=encode),
        loader(strategy, rows(evaluate, seed=1), is_dpo=False, encode=encode) if evaluate else None,
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        encode,
        max_epochs=1,
        loss=loss,
    )
    trainer.fit(strategy.args)
    return Run(trainer, fastdpo.calls - before)


def run_two_ranks(directory: Path, *stages: int) -> list[dict]:
    """Runs `zero_worker.py` on two ranks and returns the results of each, by the stages of ZeRO.

    Rank r trains on `rows(12, seed=r)`.
    """
    for seed in range(2):
        checkpoint(directory, seed=seed)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [*map(str, (HERE, HERE / "stand_ins", ROOT)), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = run_launcher(
        [*launch, str(HERE / "zero_worker.py"), str(directory), *map(str, stages)],
        seconds=400,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def assert_same(stock: Run, patched: Run) -> None:
    """Asserts that all logged numbers and all gradients of all steps agree up to rounding."""
    assert len(stock.gradients) == len(patched.gradients) > 0
    assert_same_training(stock, patched, stock.in_float64)
