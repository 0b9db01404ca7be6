"""TRL's RewardTrainer. Its loss is computed from what its model returns, so that nothing of it is replaced."""

from __future__ import annotations

from typing import Any

from ...models.state import ForwardOptions
from ..line import TrainerLine

_PARAMETERS = {"compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]}


class RewardLine(TrainerLine):
    parameters = _PARAMETERS

    def request(self, trainer: Any, role: str) -> ForwardOptions:
        return super().request(trainer, role)._replace(rewards=True)
