"""Preference pairs of multi-turn conversations with tools, in published shapes, with random token ids.

Each turn of a conversation is a pair. Its prompt is all that was said before: messages of the user, outputs of tools,
and chosen responses. The numbers of turns are those of AgentInstruct (arXiv:2310.12823, table 1), 5.24 in the mean.
Lengths are those of LMSYS-Chat-1M (arXiv:2309.11998, table 1): a message or an output of a tool has 69.5 tokens in the
mean, and a response 214.5. Turns after the first are drawn from a Poisson distribution, lengths from lognormal ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.sides.workload import FIRST_REGULAR_TOKEN, Workload
from fastdpo.batching import kinship_of, random_order

TURNS, MESSAGE, RESPONSE = 5.24, 69.5, 214.5
SPREAD = 0.6  # standard deviation of the logarithm of a length

Pair = dict[str, list[int]]


def conversations(n: int, vocabulary: int, seed: int = 0, scale: float = 1.0) -> list[Pair]:
    """The pairs of n conversations, with the columns of TRL's collator.

    Args:
        n: number of conversations.
        vocabulary: size of the vocabulary.
        seed: of lengths and ids.
        scale: of all lengths.
    """
    rng = np.random.default_rng(seed)

    def ids(mean: float) -> list[int]:
        length = scale * mean * rng.lognormal(-(SPREAD**2) / 2, SPREAD)
        return rng.integers(FIRST_REGULAR_TOKEN, vocabulary, max(1, round(length))).tolist()

    pairs = []
    for _ in range(n):
        said: list[int] = []
        for _ in range(1 + rng.poisson(TURNS - 1)):
            prompt, chosen, rejected = [*said, *ids(MESSAGE)], ids(RESPONSE), ids(RESPONSE)
            pairs.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
            said = [*prompt, *chosen]
    return pairs


@dataclass(frozen=True)
class ConversationWorkload(Workload):
    """Batches of the turns of conversations.

    Attributes:
        conversations: number of conversations.
        scale: of all lengths.
        indices: of the pairs in each batch.
    """

    conversations: int = 0
    scale: float = 1.0
    indices: tuple[tuple[int, ...], ...] = ()

    def examples(self, batch: int) -> list[Pair]:
        pairs = conversations(self.conversations, self.size.vocabulary, scale=self.scale)
        return [pairs[i] for i in self.indices[batch]]


def in_order(base: Workload, n: int, pairs_of_batch: int, *, grouped: bool, scale: float = 1.0) -> ConversationWorkload:
    """The whole batches of an epoch of n conversations, in a random order, or as `group_prompts` reorders it.

    Args:
        base: has the model.
        n: number of conversations.
        pairs_of_batch: pairs of a batch.
        grouped: whether to reorder them.
        scale: of all lengths.
    """
    pairs = conversations(n, base.size.vocabulary, scale=scale)
    order: Iterable[int] = random_order(len(pairs))(0)[: len(pairs) // pairs_of_batch * pairs_of_batch]
    if grouped:
        order = kinship_of(pairs).grouped([*order], pairs_of_batch)
    indices = tuple(map(tuple, np.reshape([*order], (-1, pairs_of_batch)).tolist()))
    lengths = tuple(tuple(tuple(map(len, pairs[i].values())) for i in batch) for batch in indices)
    return ConversationWorkload(
        lengths, size=base.size, max_length=base.max_length, conversations=n, scale=scale, indices=indices
    )
