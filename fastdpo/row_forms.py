"""Checks of the arguments of `packing.pack`: its options, and on the host what rows hold, such as whether they have the
form that the caller has named: the order of pairs, the shift of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from . import checks

IGNORE_INDEX = -100
MAX_ID = 2**31 - 1  # products of ids and positions must fit in int64

Ints = NDArray[np.int64]


def require_form(
    op: str, groups: Tensor | str | None, reach: int | None, tokens: int | Callable[[int], int] | None, n_rows: int
) -> None:
    """The arguments are those of `packing.pack`, for this number of rows."""
    if isinstance(groups, str):
        rule = 'be a tensor, "content", "pairs" or None'
        checks.require(groups in ("content", "pairs"), op, "groups", rule, repr(groups))
        is_paired = groups != "pairs" or n_rows % 2 == 0
        checks.require(is_paired, op, "input_ids", 'have an even number of rows for groups="pairs"', n_rows)
    elif groups is not None:
        checks.require_tensors(op, groups=groups)
        checks.require_values(op, groups=groups)
        checks.require_shape(op, "groups", groups, [n_rows])
        checks.require_ints(op, groups=groups)
    for name, number in (("reach", reach), ("tokens", None if callable(tokens) else tokens)):
        if number is not None:
            checks.require_integer(op, name, number, "be an int or None")


def require_host_values(op: str, real: NDArray[np.integer | np.bool_], target: Ints) -> None:
    """Raises an error if a mask is not one of 0 and 1, or a target is no id.

    Args:
        op: the public function, for its error message.
        real: [R, L] where tokens are real, 2 for another value of the mask.
        target: [M] the ids that are scored.
    """
    is_mask = real.dtype == np.bool_ or not (real > 1).any()
    rule = "be bool, int, or floating point with values 0 and 1"
    checks.require(is_mask, op, "attention_mask", rule, "another value")
    if (target < 0).any():
        raise ValueError(f"{op}: labels must be {IGNORE_INDEX} or token ids; got {target.min()}")
    if (target > MAX_ID).any():
        raise ValueError(f"{op}: labels must be {IGNORE_INDEX} or token ids below 2**31; got {target.max()}")


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
        ValueError: chosen and rejected rows come in turn.
    """
    rows, pairs = len(prompts), len(prompts) // 2
    in_turn = all(prompts[i] == prompts[i + 1] for i in range(0, rows, 2))
    if pairs > 1 and in_turn and all(prompts[i] != prompts[i + pairs] for i in range(pairs)):
        raise ValueError(
            "pack_pairs: input_ids must have all chosen rows first; got chosen and rejected rows in turn. "
            'ops.pack(..., groups="content") shares in any order'
        )
    return [i % pairs for i in range(rows)]
