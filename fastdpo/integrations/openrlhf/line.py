"""What the trainer lines of OpenRLHF share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...models import forward
from ...reasons import Reason
from ..line import TrainerLine
from ..training_events import first_step, train


class OpenRLHFLine(TrainerLine):
    """One trainer line of OpenRLHF, whose trainers have no callbacks of transformers."""

    replaced = ("concatenated_forward", "save_logs_and_checkpoints")

    def replace(self) -> None:
        super().replace()
        self.wrap("fit", functools.partial(train, self))

    def fuses(self, trainer: Any, model: Any) -> bool:
        """Not under the strategy of some trainers, and not for models of which all calls fall back: the trainer's own
        function runs then.
        """
        if not super().fuses(trainer, model):
            return False
        reason = _strategy_reason(trainer.strategy) or forward.unsupported_reason(model, self.name)
        if reason is not None:
            forward.record_fallback(model, self.name, reason)
        return reason is None

    def save_logs_and_checkpoints(self, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> None:
        first_step(self, trainer)
        stock(trainer, *args, **kwargs)


def _strategy_reason(strategy: Any) -> Reason | None:
    """Why no call can be fused under the strategy of a trainer, or None."""
    if strategy.ring_attn_group is not None:
        return Reason("split-sequences", method="ring attention")
    if getattr(strategy, "ds_tensor_parallel_size", 1) > 1:
        return Reason("split-model")
    return None
