"""How much time a pair takes, relative to other pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import checks
from ..lengths import PairLengths


@dataclass(frozen=True)
class CostModel:
    """The cost of a pair as a weighted sum of what is computed for it. Only ratios matter.

    Attributes:
        token: weight of a packed token, which every linear layer multiplies.
        attended: weight of a query and a key that it sees.
        scored: weight of a row of the LM head.
    """

    token: float = 1.0
    attended: float = 0.0
    scored: float = 0.0

    def __post_init__(self) -> None:
        rule = "be a finite number that is not negative"
        for name, value in vars(self).items():
            checks.require_number("CostModel", name, value, rule)
            checks.require(0 <= value < float("inf"), "CostModel", name, rule, value)
        checks.require(self.token > 0, "CostModel", "token", "be positive", self.token)

    @classmethod
    def of_model(cls, model: Any) -> CostModel:
        """The floating-point operations of a forward pass of a transformers model.

        A matrix of n weights takes 2n operations a token. A query and a key take 4 operations per
        channel and layer: 2 for their product and 2 for the sum of values. Windows are not
        considered. A model without a known number of layers and heads costs by its tokens alone.

        Args:
            model: has `config`, `num_parameters` and `get_output_embeddings`. With sparse experts, all of them
                count. A reward model has no LM head, and scores at no cost.
        """
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        hidden, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
        if not (heads and hidden and layers):
            return cls()
        channels = heads * (getattr(config, "head_dim", None) or hidden // heads)
        weights = model.num_parameters(exclude_embeddings=True)
        head = hidden * config.vocab_size if model.get_output_embeddings() is not None else 0
        if not getattr(config, "tie_word_embeddings", False):
            weights -= head
        return cls(2.0 * max(weights, 1), 4.0 * channels * layers, 2.0 * head)

    def costs(self, lengths: PairLengths, *, share: bool = True) -> np.ndarray:
        """The costs of N pairs, float64 [N].

        Args:
            lengths: of the pairs.
            share: as in `PairLengths.packed`.
        """
        computed = self.token * lengths.packed(share=share) + self.attended * lengths.attended(share=share)
        return computed + self.scored * lengths.scored(share=share)
