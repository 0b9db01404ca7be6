"""TRL's RewardTrainer. Its loss is computed from what its model returns, in TRL's own code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

from ...models.batch import labels_from
from ...models.parts import find_base, text_config
from ...models.reward_head import CLASSIFIER_HEAD
from ..collating import REPLACED, with_packed_batches
from ..line import TrainerLine
from .gathering import Gather, of_all_ranks
from .max_tokens.token_budget import RELIES_ON, TokenBudget


class RewardLine(TrainerLine):
    parameters = MappingProxyType({"compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]})
    relies_on = MappingProxyType({**TrainerLine.relies_on, "max_tokens": RELIES_ON})
    replaced = ("compute_loss", *REPLACED)
    rewards = CLASSIFIER_HEAD

    def get_train_dataloader(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return with_packed_batches(self, stock, trainer, *args, padding=_padding(trainer), **kwargs)

    def init(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().init(stock, trainer, *args, **kwargs)
        if self.options.max_tokens is not None and self.state_of(trainer) is not None:
            TokenBudget(self).install(trainer)

    def compute_loss(
        self, stock: Callable, trainer: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        state, ids = self.state_of(trainer), inputs.get("input_ids")
        if state is None or ids is None:
            return stock(trainer, model, inputs, *args, **kwargs)
        gather = None if state.gather is None else _counting_pairs(state.gather, len(ids) // 2)
        with (
            labels_from(ids, ids),
            nullcontext() if gather is None else of_all_ranks(trainer.accelerator, gather),
        ):
            return stock(trainer, model, inputs, *args, **kwargs)


def _counting_pairs(gather: Gather, pairs: int) -> Gather:
    """Gathers a mean over the pairs of a micro-batch once for each of them. TRL also gathers their scores, [2B, 1],
    and their number of tokens, an integer.
    """
    return lambda x: gather(x.expand(pairs) if x.dim() == 0 and x.is_floating_point() else x)


def _padding(trainer: Any) -> int | None:
    base = find_base(trainer.model)
    return None if base is None else text_config(base).pad_token_id
