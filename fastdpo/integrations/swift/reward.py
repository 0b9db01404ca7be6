"""ms-swift's RewardTrainer. Its loss is computed from what its model returns, so that nothing of it is replaced."""

from __future__ import annotations

from .line import SwiftLine

_PARAMETERS = {"compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]}


class SwiftRewardLine(SwiftLine):
    parameters = _PARAMETERS
    rewards = True
