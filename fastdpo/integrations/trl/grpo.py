"""TRL's GRPOTrainer (see `groups`)."""

from .groups import GroupLine
from .names import GRPO

_line = GroupLine(GRPO, "trl.trainer.grpo_trainer")

unsupported_reason = _line.unsupported_reason
trainer_class = _line.trainer_class
enable = _line.enable
disable = _line.disable
