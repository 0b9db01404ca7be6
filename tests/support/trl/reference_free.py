"""Tiny CPO and ORPO trainings in TRL, recorded step by step."""

from __future__ import annotations

import functools
from pathlib import Path

from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.support.trl.dpo import OPTIONS, Run, pairs, record, tokenizer

CONFIGS = {CPOTrainer: CPOConfig, ORPOTrainer: ORPOConfig}


def train_reference_free(
    directory: Path,
    model: PreTrainedModel,
    reference: PreTrainedModel | None = None,
    *,
    trainer_class: type[CPOTrainer] | type[ORPOTrainer],
    peft_config: PeftConfig | None = None,
    data: list[dict[str, str]] | None = None,
    evaluate: int = 0,
    **overrides,
) -> Run:
    """Runs a short training on `data` (default: `pairs`) with the patches that are active. There is no reference.

    `evaluate` is a number of pairs that are evaluated after the training. `overrides` are fields of
    the trainer's configuration.
    """
    config = next(config for kind, config in CONFIGS.items() if issubclass(trainer_class, kind))
    fields = {"output_dir": str(directory / "out"), **OPTIONS, "per_device_eval_batch_size": 4, **overrides}
    make = functools.partial(
        trainer_class,
        model=model,
        args=config(**fields),
        train_dataset=Dataset.from_list(data or pairs(16)),
        eval_dataset=Dataset.from_list(pairs(evaluate, seed=1)) if evaluate else None,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    return record(make, evaluate=evaluate > 0)


train_cpo = functools.partial(train_reference_free, trainer_class=CPOTrainer)
train_orpo = functools.partial(train_reference_free, trainer_class=ORPOTrainer)
