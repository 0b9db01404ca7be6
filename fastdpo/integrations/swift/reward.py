"""ms-swift's RewardTrainer. Its loss is computed from what its model returns, so that nothing of it is replaced."""

from __future__ import annotations

from ..trl.reward import RewardLine
from .line import SwiftLine


class SwiftRewardLine(SwiftLine):
    parameters = RewardLine.parameters
    rewards = RewardLine.rewards
