"""Preference training as other programs write it, each loop in the shape of its program, from the logits of the model.

Every module has `train(policy, reference, batches, record)`. A batch is a list of `Pair`. `record` is given what the
program logs in a step, after its backward.
"""

from typing import NamedTuple


class Pair(NamedTuple):
    """The token ids of a preference pair."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
