"""TRL's RLOOTrainer (see `groups`)."""

from .groups import GroupLine
from .names import RLOO

_line = GroupLine(RLOO, "trl.trainer.rloo_trainer")

unsupported_reason = _line.unsupported_reason
trainer_class = _line.trainer_class
enable = _line.enable
disable = _line.disable
