"""Every trainer that TRL exports, what `fastdpo.patch()` does to it, and tiny trainings of those without a line."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import trl
import trl.experimental
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer
from trl.experimental.bema_for_ref_model import DPOTrainer as BEMATrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.kto import KTOTrainer

from fastdpo.integrations.registry import ENTRIES, Entry
from tests.support.trl.dpo import DPO, OPTIONS, Recipe, pairs
from tests.support.trl.groups import build_group
from tests.support.trl.kto import KTO
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


def entry_of(trainer_class: type) -> Entry | None:
    """The entry of a class itself."""
    name = f"trl.{trainer_class.__name__}"
    return next((x for x in ENTRIES if x.trainer == name and trainer_class.__module__ == x.trainer_module), None)


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


def build(name: str, directory: Path, callbacks: list, cast: Callable) -> Trainer:
    """A trainer that learns from a teacher, in the package of its name."""
    module = importlib.import_module(f"{X}.{name.lower()}")
    config = getattr(module, f"{name}Config")
    options = {"output_dir": str(directory), **OPTIONS, "max_length": 256, "max_new_tokens": 8, "lmbda": 0.0}
    return getattr(module, f"{name}Trainer")(
        model=cast(model(directory)),
        teacher_model=cast(model(directory, 1)),
        args=config(**{field.name: options[field.name] for field in fields(config) if field.name in options}),
        train_dataset=Dataset.from_list(conversations()),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


class Claim(NamedTuple):
    """What `patch` does to a trainer that has no line of its own.

    Attributes:
        what: in words.
        build: makes a trainer in a directory, with callbacks and with models that a function is applied to; None if it
            is untouched, and so are the modules that it is made of.
        calls: the fused calls of three steps.
    """

    what: str
    build: Callable[..., Trainer] | None = None
    calls: dict[str, int] = {}  # noqa: RUF012


def subclass(recipe: Recipe, trainer_class: type, directory: Path, callbacks: list, cast: Callable) -> Trainer:
    models = [cast(writer(seed)) for seed in range(2)]
    return recipe.build(directory, *models, trainer_class=trainer_class, callbacks=callbacks)


def gmpo(directory: Path, callbacks: list, cast: Callable) -> Trainer:
    return build_group(directory, cast(writer()), GMPOTrainer, callbacks=callbacks)


X = "trl.experimental"
LOGITS = "as in TRL: its own loss reads logits"
UNTOUCHED = "untouched"
CLAIMS = {
    f"{X}.gmpo.GMPOTrainer": Claim("fused as a `GRPOTrainer`", gmpo, dict(policy=3)),
    f"{X}.bema_for_ref_model.DPOTrainer": Claim(
        "fused as a `DPOTrainer`", functools.partial(subclass, DPO, BEMATrainer), dict(policy=3, reference=3)
    ),
    f"{X}.kto.KTOTrainer": Claim(
        "fused as a `KTOTrainer`", functools.partial(subclass, KTO, KTOTrainer), dict(policy=6, reference=3)
    ),
    **{f"{X}.{x.lower()}.{x}Trainer": Claim(LOGITS, functools.partial(build, x)) for x in ("GKD", "GOLD")},
    **dict.fromkeys(
        (
            *(f"{X}.{x}Trainer" for x in ("sdft.SDFT", "sdpo.SDPO", "iw_opd.IWOPD", "distillation.Distillation")),
            "trl.DistillationTrainer",
        ),
        Claim(UNTOUCHED),
    ),
    f"{X}.server_distillation.ServerDistillationTrainer": Claim(UNTOUCHED),
    f"{X}.async_grpo.AsyncGRPOTrainer": Claim(f"{UNTOUCHED}: packs its rows and shares their prefixes itself"),
    f"{X}.async_distillation.AsyncDistillationTrainer": Claim(UNTOUCHED),
}
"""What becomes of each trainer that has no line of its own."""
