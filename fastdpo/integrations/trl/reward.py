"""TRL's RewardTrainer. Its loss is computed from what its model returns, in TRL's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...data.columns import COLUMNS
from ...models.batch import labels_from
from ...models.parts import find_base, text_config
from ...models.reward_head import CLASSIFIER_HEAD
from ..collating import REPLACED
from ..line import TrainerLine
from .dpo import RELIES_ON
from .gathering import of_all_ranks
from .max_tokens.budget import Budget


def uncuttable(trainer: Any) -> str | None:
    adapters = getattr(trainer.model, "peft_config", {}).values()
    if any(adapter.is_prompt_learning for adapter in adapters):
        return "prompt tuning, with which a reward depends on the width of the batch"
    return None


class RewardLine(TrainerLine):
    replaced = ("compute_loss", *REPLACED)
    rewards = CLASSIFIER_HEAD
    cutting = Budget(
        relies_on=RELIES_ON,
        rows_of_unit=2,
        columns=COLUMNS[1:],
        entries=frozenset({"input_ids", "attention_mask", "margin"}),
        fields=("logits",),
        scores=1,
        uncuttable=uncuttable,
    )

    def compute_loss(
        self, stock: Callable, trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        ids = inputs.get("input_ids")
        if ids is None:
            return stock(trainer, model, inputs, *args, **kwargs)
        with labels_from(ids, ids), of_all_ranks(trainer.accelerator):
            return stock(trainer, self.noting(trainer, model), inputs, *args, **kwargs)

    def padding(self, trainer: Any) -> int | None:
        base = find_base(trainer.model)
        return None if base is None else text_config(base).pad_token_id
