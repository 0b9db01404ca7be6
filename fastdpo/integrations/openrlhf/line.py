"""What the trainer lines of OpenRLHF share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...reasons import Reason
from ..line import TrainerLine


class OpenRLHFLine(TrainerLine):
    """One trainer line of OpenRLHF, whose trainers have no callbacks of transformers."""

    replaced = ("concatenated_forward", "save_logs_and_checkpoints", "fit")

    def fit(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return self._train(stock, trainer, *args, **kwargs)

    def save_logs_and_checkpoints(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.first_step(trainer)
        stock(trainer, *args, **kwargs)


def strategy_unsupported_reason(trainer: Any) -> Reason | None:
    """Why no call can be fused under the strategy of a trainer, or None."""
    strategy = trainer.strategy
    if strategy.ring_attn_group is not None:
        return Reason("split-sequences", method="ring attention")
    if getattr(strategy, "ds_tensor_parallel_size", 1) > 1:
        return Reason("split-model")
    return None
