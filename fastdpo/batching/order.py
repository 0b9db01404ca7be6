"""The order in which an epoch goes through the pairs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from .. import checks

Order = Callable[[int], Sequence[int] | np.ndarray]
"""Returns the indices of the pairs of an epoch, given the number of the epoch."""


def random_order(pairs: int, seed: int = 0) -> Order:
    """A permutation of this many pairs that depends on the seed and on the epoch alone."""
    return lambda epoch: np.random.default_rng((seed, epoch)).permutation(pairs)


def group_prompts(order: Sequence[int] | np.ndarray, prompts: np.ndarray, size: int) -> np.ndarray:
    """Reorders the pairs of an epoch such that those of a prompt are in one batch, as far as they fit.

    Batches are filled one after the other: with the first prompt of the order that is left, and then
    with the first ones whose pairs all fit. If none do, the pairs of the first one are divided.

    Args:
        order: the indices of the M pairs of the epoch.
        prompts: int [N], equal for pairs of the same prompt.
        size: pairs of a batch.

    Returns:
        The same indices, int64 [M].

    Raises:
        TypeError, ValueError: the size is not a positive integer.
    """
    checks.require_positive_integer("group_prompts", "size", size)
    order = np.asarray(order, np.int64)
    of_prompts: dict[int, list[int]] = {}
    for pair, prompt in zip(order.tolist(), prompts[order].tolist(), strict=True):
        of_prompts.setdefault(prompt, []).append(pair)
    groups = [pairs[i : i + size] for pairs in of_prompts.values() for i in range(0, len(pairs), size)]
    by_size: list[deque[tuple[int, list[int]]]] = [deque() for _ in range(size + 1)]
    for place, pairs in enumerate(groups):
        by_size[len(pairs)].append((place, pairs))
    result: list[int] = []
    while len(result) < len(order):
        room = size - len(result) % size
        left = [waiting[0] for waiting in by_size if waiting]
        place, pairs = min((group for group in left if len(group[1]) <= room), default=min(left))
        by_size[len(pairs)].popleft()
        result += pairs[:room]
        if len(pairs) > room:
            by_size[len(pairs) - room].appendleft((place, pairs[room:]))  # before all others
    return np.array(result, np.int64)
