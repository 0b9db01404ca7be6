"""Tiny trainings in LLaMA-Factory by its own `run_exp`, from its arguments on, recorded step by step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llamafactory.train.tuner import run_exp  # first: without it, TRL 0.24 cannot be imported next to transformers 5
from transformers import AutoModelForCausalLM, TrainerCallback

import fastdpo
from tests.support.comparison import assert_same_training, tiny
from tests.support.models.multimodal_text import KINDS as MULTIMODAL
from tests.support.models.multimodal_text import multimodal_model
from tests.support.programs.harness import numbers
from tests.support.programs.workload import Workload

WORKLOAD = Workload(pairs=12, batch=4)
OPTIONS = dict(
    do_train=True,
    finetuning_type="full",
    template="empty",
    cutoff_len=64,
    per_device_train_batch_size=WORKLOAD.batch,
    per_device_eval_batch_size=WORKLOAD.batch,
    max_steps=3,
    logging_steps=1,
    save_strategy="no",
    optim="sgd",
    learning_rate=0.01,
    lr_scheduler_type="constant",
    max_grad_norm=1e9,
    report_to="none",
    disable_tqdm=True,
    overwrite_output_dir=True,
    overwrite_cache=True,
    preprocessing_num_workers=None,
)
LORA = dict(finetuning_type="lora", lora_rank=4, lora_target="q_proj,v_proj")
LOGITS = "logits/"
DATASETS = {"rm": "dpo"}
"""The data sets of stages that have another name."""
FUSED = {
    "dpo": {("policy", "fused"): 3, ("reference", "fused"): 3},
    "kto": {("policy", "fused"): 6, ("reference", "fused"): 3},
    "rm": {("policy", "fused"): 3},
}
"""Calls of a patched training. For KTO, the policy is called a second time for the KL term."""
STOCK_CALLS = {
    "dpo": {("policy", "stock"): 3, ("reference", "stock"): 3},
    "kto": {("policy", "stock"): 6, ("reference", "stock"): 6},
    "rm": {("policy", "stock"): 3},
}
"""The calls if none is fused."""


def write_data(directory: Path, pairs: list[dict[str, str]]) -> None:
    """Writes pairs of text as data sets of LLaMA-Factory for each stage. For KTO, every other answer is tagged."""

    def turn(role: str, text: str) -> dict[str, str]:
        return {"from": role, "value": text}

    answers = ("chosen", "rejected")
    sets = {
        "dpo": [
            {"messages": [turn("human", pair["prompt"])], **{name: turn("gpt", pair[name]) for name in answers}}
            for pair in pairs
        ],
        "kto": [
            {"messages": [turn("human", pair["prompt"]), turn("gpt", pair[answers[i % 2]])], "kto_tag": i % 2 == 0}
            for i, pair in enumerate(pairs)
        ],
    }
    columns = {"dpo": ("messages", *answers), "kto": ("messages", "kto_tag")}
    for name, rows in sets.items():
        (directory / f"{name}.json").write_text(json.dumps(rows))
    description = {
        name: {
            "file_name": f"{name}.json",
            "formatting": "sharegpt",
            "ranking": name == "dpo",
            "columns": {column: column for column in columns[name]},
        }
        for name in sets
    }
    (directory / "dataset_info.json").write_text(json.dumps(description))


def special_pairs() -> list[dict[str, str]]:
    """The pairs of `WORKLOAD`, two of them with a common prefix of their completions."""
    pairs = WORKLOAD.pairs_of_text()
    pairs[0]["rejected"] = pairs[0]["chosen"] + " w1 w2"
    pairs[1]["chosen"], pairs[1]["rejected"] = "w3 w4 w5", "w3 w4 w6 w7"
    return pairs


def checkpoint(directory: Path, kind: str = "llama", seed: int = 0, **config: Any) -> Path:
    """Saves a tiny model and its tokenizer, and returns their path."""
    if kind in MULTIMODAL:
        model = multimodal_model(kind, WORKLOAD.vocabulary, seed)
    else:
        model = tiny(AutoModelForCausalLM, kind, WORKLOAD.vocabulary, seed, **config)
    path = directory / f"{kind}{seed}"
    model.save_pretrained(path)
    WORKLOAD.tokenizer().save_pretrained(path)
    return path


class Run(TrainerCallback):
    """A record of a training: the numbers logged, the gradients of each step, and fastdpo's counters.

    Attributes:
        logits: of each log, the metrics of logits, which are not in `logs`.
        model: the trainer's policy.
    """

    def __init__(self) -> None:
        self.history: list[dict] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.calls: Counter = Counter()
        self.model: Any = None

    def on_init_end(self, args, state, control, **kwargs):
        self.history = state.log_history

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.history, self.model = state.log_history, model

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.requires_grad and p.grad is not None})

    @property
    def logs(self) -> list[dict[str, float]]:
        """The logged numbers. The KL term is multiplied by the default beta, as rewards are, and has
        their tolerance.
        """
        logs = [{name: x for name, x in numbers(log).items() if LOGITS not in name} for log in self.history]
        return [log | ({"kl": 0.1 * log["kl"]} if "kl" in log else {}) for log in logs]

    @property
    def logits(self) -> list[dict[str, float]]:
        return [{name: x for name, x in log.items() if LOGITS in name} for log in self.history]


def train(directory: Path, model: Path, stage: str = "dpo", evaluate: bool = False, **options: Any) -> Run:
    """Runs a short training with the patches that are active.

    `evaluate` evaluates after it, on the same data. `options` are arguments of LLaMA-Factory.
    """
    if not (directory / "dataset_info.json").exists():
        write_data(directory, special_pairs())
    run, before = Run(), Counter(fastdpo.calls)
    data = dict(dataset=DATASETS.get(stage, stage), dataset_dir=str(directory))
    evaluation = dict(eval_dataset=data["dataset"], do_eval=True) if evaluate else {}
    arguments = {**OPTIONS, **data, **evaluation, **options}
    run_exp(
        {"model_name_or_path": str(model), "stage": stage, "output_dir": str(directory / "out"), **arguments}, [run]
    )
    run.calls = Counter({key[1:]: n for key, n in (fastdpo.calls - before).items()})
    return run


def train_both(
    directory: Path, stage: str = "dpo", kind: str = "llama", tiny: dict | None = None, **options: Any
) -> tuple[Run, Run]:
    """Trains stock, then patched, from the same weights. `tiny` are fields of the model's configuration."""
    model = checkpoint(directory, kind, **(tiny or {}))
    stock = train(directory, model, stage, **options)
    assert not stock.calls
    with fastdpo.patched("llamafactory", "trl"):
        return stock, train(directory, model, stage, **options)


def assert_same(stock: Run, patched: Run, in_float64: Callable | None = None) -> None:
    """Asserts that all gradients and all logged numbers but the means of logits agree up to rounding.

    Those are logged by another name, since they are other means.
    """
    assert len(stock.gradients) == len(patched.gradients) > 0
    assert_same_training(stock, patched, in_float64)
    renamed = [{name.replace(LOGITS, f"completion_{LOGITS}") for name in log} for log in stock.logits]
    assert [set(log) for log in patched.logits] == renamed


def assert_stock(stock: Run, patched: Run) -> None:
    """Asserts that two trainings are the same to the last bit, with all of their logs."""
    assert len(stock.gradients) == len(patched.gradients) > 0
    for a, b in zip(stock.gradients, patched.gradients, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert stock.logs == patched.logs
    assert stock.logits == patched.logits
