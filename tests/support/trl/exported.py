"""Every trainer that TRL exports, what `fastdpo.patch()` does to it, and tiny trainings of those without a line."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import trl
import trl.experimental
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer

from fastdpo.integrations.lines import LINES, Line
from tests.support.trl.dpo import OPTIONS, pairs
from tests.support.trl.online import writer

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
BYTES = ["<pad>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]


def exported() -> Iterator[tuple[str, type]]:
    """Each trainer class by the name that it is imported by."""
    packages = ("trl", *(f"trl.experimental.{x.name}" for x in pkgutil.iter_modules(trl.experimental.__path__)))
    for package in packages:
        module = importlib.import_module(package)
        for name in dir(module):
            found = getattr(module, name) if name.endswith("Trainer") and name[0] != "_" else None
            if isinstance(found, type) and issubclass(found, Trainer):
                yield f"{package}.{name}", found


def line_of(trainer_class: type) -> Line | None:
    """The line that patches a class itself."""
    name = f"trl.{trainer_class.__name__}"
    return next((x for x in LINES if x.trainer == name and trainer_class.__module__ in x.trainer_modules), None)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes for conversations, since GOLD takes no other."""
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(BYTES)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left")
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, model_input_names=inputs, **special
    )


def model(directory: Path, seed: int = 0) -> PreTrainedModel:
    """A model that comes from a folder, where trainers look for its tokenizer."""
    made = writer(seed, vocab_size=len(BYTES), max_position_embeddings=512)
    folder = directory / f"model {seed}"
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    made.config._name_or_path = str(folder)
    return made


def conversations() -> list[dict]:
    return [
        {"messages": [dict(role="user", content=row["prompt"]), dict(role="assistant", content=row["chosen"])]}
        for row in pairs(16)
    ]


SHORT = dict(max_completion_length=8, max_new_tokens=8, max_length=256, max_prompt_length=128)


def build(name: str, directory: Path, callbacks: list) -> Trainer:
    """A trainer whose own loss reads logits, and which takes a teacher."""
    package, _, trainer = name.rpartition(".")
    module = importlib.import_module(package)
    config = getattr(module, trainer.replace("Trainer", "Config"))
    names = {field.name for field in fields(config)}
    options = {"output_dir": str(directory), **OPTIONS, **SHORT, "lmbda": 0.0}
    return getattr(module, trainer)(
        model=model(directory),
        teacher_model=model(directory, 1),
        args=config(**{key: x for key, x in options.items() if key in names}),
        train_dataset=Dataset.from_list(conversations()),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


X = "trl.experimental"
LOGITS = "as in TRL: its own loss reads logits"
UNTOUCHED = "untouched"
SERVER = f"{UNTOUCHED}, needs a server"
CLAIMS = {
    f"{X}.gmpo.GMPOTrainer": "fused as a `GRPOTrainer`",
    f"{X}.bema_for_ref_model.DPOTrainer": "fused as a `DPOTrainer`",
    f"{X}.kto.KTOTrainer": "fused as a `KTOTrainer`",
    f"{X}.gkd.GKDTrainer": LOGITS,
    f"{X}.gold.GOLDTrainer": LOGITS,
    f"{X}.sdft.SDFTTrainer": UNTOUCHED,
    f"{X}.sdpo.SDPOTrainer": UNTOUCHED,
    f"{X}.iw_opd.IWOPDTrainer": UNTOUCHED,
    "trl.DistillationTrainer": UNTOUCHED,
    f"{X}.distillation.DistillationTrainer": UNTOUCHED,
    f"{X}.server_distillation.ServerDistillationTrainer": SERVER,
    f"{X}.async_grpo.AsyncGRPOTrainer": SERVER,
    f"{X}.async_distillation.AsyncDistillationTrainer": SERVER,
}
"""What `patch` does to each trainer that has no line of its own. Options of the contract train those that are fused."""
