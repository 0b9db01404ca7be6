"""The tokens that enter a backbone."""

from __future__ import annotations

from torch import nn

from fastdpo.commands.check.meters import tell_tokens


class TokenCounter:
    """Counts the tokens that enter a backbone, including padding.

    Attributes:
        tokens: those of all calls since the last `take`.
        remove: ends the count.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self.tokens = 0
        self.remove = tell_tokens(backbone, self._add).remove

    def _add(self, tokens: int) -> None:
        self.tokens += tokens

    def take(self) -> int:
        """Returns the number of tokens since the last call."""
        taken, self.tokens = self.tokens, 0
        return taken
