"""Checks on the host that rows have the form that the caller has named: the order of pairs, the shift of labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def require_ids(op: str, ids: Ints, targets: Ints, scored: NDArray[np.bool_], shifted: bool) -> None:
    """Raises an error if targets are not the ids that follow, but would be if labels had the other form: shifted, or
    not shifted.

    Rows with a single label say nothing. Those of reward models are no ids.

    Args:
        op: the public function, for its error message.
        ids: [R, L] of the rows.
        targets: [R, W] of each position, from labels of the named form.
        scored: [R, W], where they are scored.
        shifted: the named form.
    """
    rows = scored.sum(1) > 2 - shifted  # in the other form, the last label has no id to be compared with

    def are_ids(ahead: int) -> bool:
        """Whether each target is the id so many positions ahead of the one that predicts it."""
        width = min(targets.shape[1], ids.shape[1] - ahead)
        same = targets[rows, :width] == ids[rows, ahead : ahead + width]
        return bool((same | ~scored[rows, :width]).all())

    if rows.any() and not are_ids(1) and are_ids(0 if shifted else 2):
        rule, got = "not be shifted without shifted=True", "labels that are shifted already"
        if shifted:
            rule, got = "be shifted with shifted=True", "labels that are not"
        raise ValueError(f"{op}: labels must {rule}; got {got}")


def pairs_of(prompts: Sequence[object]) -> list[int]:
    """[R] the pair of each of R rows with these prompts, of which i and i + R/2 are a pair.

    Raises:
        ValueError: the number of rows is odd, or chosen and rejected rows come in turn.
    """
    rows, pairs = len(prompts), len(prompts) // 2
    if rows % 2:
        raise ValueError(f"pack_pairs: input_ids must have an even number of rows; got {rows}")
    in_turn = all(prompts[i] == prompts[i + 1] for i in range(0, rows, 2))
    if pairs > 1 and in_turn and all(prompts[i] != prompts[i + pairs] for i in range(pairs)):
        raise ValueError(
            "pack_pairs: input_ids must have all chosen rows first; got chosen and rejected rows in turn. "
            'ops.pack(..., groups="content") shares in any order'
        )
    return [i % pairs for i in range(rows)]
