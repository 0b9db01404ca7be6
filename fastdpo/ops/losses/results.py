"""The result of `linear_preference_loss`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..head.results import TokenLogps
from .preference_loss import PreferenceLoss


class LinearPreferenceLoss(NamedTuple):
    """The loss of preference pairs, and the log-probabilities that it was computed from. Only the
    scalar `loss` is differentiable.

    Attributes:
        pairs: the losses and rewards, [P].
        chosen_logps, rejected_logps: [P] the summed log-probabilities, in nats.
        tokens: the log-probabilities and statistics of the tokens, [N].
    """

    pairs: PreferenceLoss
    chosen_logps: Tensor
    rejected_logps: Tensor
    tokens: TokenLogps

    @property
    def loss(self) -> Tensor:
        """The mean loss of the pairs, a scalar."""
        return self.pairs.loss
