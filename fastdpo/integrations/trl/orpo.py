"""TRL's ORPOTrainer (see `reference_free`)."""

from typing import Any

from .names import ORPO
from .reference_free import LossInputs, ReferenceFreeLine


def _loss_inputs(trainer: Any) -> LossInputs:
    return LossInputs(padding=trainer.padding_value, averages=True, nll="row")


_line = ReferenceFreeLine(ORPO, "trl.experimental.orpo.orpo_trainer", _loss_inputs)

unsupported_reason = _line.unsupported_reason
trainer_class = _line.trainer_class
enable = _line.enable
disable = _line.disable
