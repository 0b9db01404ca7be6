"""TRL's RewardTrainer. Its loss is computed from what its model returns, in TRL's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...models import layouts
from ...models.language_model import text_config
from ...models.state import ForwardOptions
from ...models.wrapped import find_base
from ..line import TrainerLine
from .batches.packed_where_collated import with_packed_batches

_PARAMETERS = {"compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]}


class RewardLine(TrainerLine):
    parameters = _PARAMETERS
    replaced = ("compute_loss", "get_train_dataloader")

    def request(self, trainer: Any, role: str) -> ForwardOptions:
        return super().request(trainer, role)._replace(rewards=True)

    def get_train_dataloader(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return with_packed_batches(self, stock, trainer, *args, padding=_padding(trainer), **kwargs)

    def compute_loss(
        self, stock: Callable, trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.state_of(trainer) is None:
            return stock(trainer, model, inputs, *args, **kwargs)
        with layouts.labelling(inputs.get("input_ids"), _padding(trainer)):
            return stock(trainer, model, inputs, *args, **kwargs)


def _padding(trainer: Any) -> int | None:
    base = find_base(trainer.model)
    return None if base is None else text_config(base).pad_token_id
