"""TRL's CPOTrainer, also for SimPO (see `reference_free`)."""

from typing import Any

from .names import CPO
from .reference_free import LossInputs, ReferenceFreeLine


def _loss_inputs(trainer: Any) -> LossInputs:
    nll = "completion" if trainer.cpo_alpha != 0 else "none"
    return LossInputs(padding=trainer.pad_token_id, averages=trainer.loss_type in ("ipo", "simpo"), nll=nll)


_line = ReferenceFreeLine(CPO, "trl.experimental.cpo.cpo_trainer", _loss_inputs)

unsupported_reason = _line.unsupported_reason
trainer_class = _line.trainer_class
enable = _line.enable
disable = _line.disable
