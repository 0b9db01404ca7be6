"""The order in which an epoch goes through the pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Order = Callable[[int], Sequence[int] | np.ndarray]
"""Returns the indices of the pairs of an epoch, given the number of the epoch."""


def random_order(pairs: int, seed: int = 0) -> Order:
    """A permutation of this many pairs that depends on the seed and on the epoch alone."""
    return lambda epoch: np.random.default_rng((seed, epoch)).permutation(pairs)
