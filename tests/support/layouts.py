"""What a layout must hold, by a loop over the tokens of the padded batch."""

from __future__ import annotations

from collections import Counter
from itertools import product

import torch
from torch import Tensor

from fastdpo.packing import IGNORE_INDEX, Layout


def assert_layout_is_right(
    layout: Layout,
    batch: tuple[Tensor, ...],
    groups: Tensor,
    shifted: bool = False,
    store_all: bool = False,
    count_padding: bool = False,
) -> None:
    """Asserts that every field of a layout equals the result of a loop over the padded batch, its ids, mask and labels.

    `groups` [R] are equal for rows that may share tokens.
    """
    ids, mask, labels = batch
    n_rows, length = ids.shape
    real = [tuple(row[real != 0].tolist()) for row, real in zip(ids, mask, strict=True)]
    offset = [int(m.int().argmax()) if m.any() else 0 for m in mask]
    width, targets = (length, labels) if shifted else (length - 1, labels[:, 1:])
    scored = [(r, c) for r, c in product(range(n_rows), range(width)) if targets[r, c] != IGNORE_INDEX]
    assert layout.output_shape == (n_rows, width)

    # Rows tile the buffer, each after its prefix. A position is the number of the tokens before one, or its column.
    stored = ids.reshape(-1)[layout.token_index].tolist()
    seen = []  # what each packed token attends to, and itself
    for prefix, prefix_length, start, own_length in layout.rows.tolist():
        assert start == len(seen)
        assert own_length > 0
        assert prefix + prefix_length <= start
        before = seen[prefix + prefix_length - 1] if prefix_length else ()
        assert len(before) == prefix_length
        seen += [(*before, *stored[start : start + i + 1]) for i in range(own_length)]
    assert len(seen) == len(stored)
    columns = (layout.token_index % length).tolist()
    assert layout.position_ids.tolist() == (columns if count_padding else [len(x) - 1 for x in seen])
    assert mask.reshape(-1)[layout.token_index].all()
    assert layout.pack(ids).tolist() == [stored]

    # Each output comes from a position that attends to exactly the tokens of its row up to there.
    assert layout.output_index.tolist() == [r * width + c for r, c in scored]
    for (r, c), source in zip(scored, layout.output_source.tolist(), strict=True):
        assert seen[int(layout.score_index[source])] == real[r][: c - offset[r] + 1]
        assert layout.targets[source] == targets[r, c]
    pairs = list(zip(layout.score_index.tolist(), layout.targets.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)  # no duplicates
    assert set(layout.output_source.tolist()) == set(range(len(pairs)))  # every score is used
    assert torch.equal(layout.unpack(layout.targets), targets.masked_fill(targets == IGNORE_INDEX, 0))

    # A token that a scored position depends on is stored once for all rows of a group with the same tokens up to it,
    # and, if positions count the padding before, with the same padding.
    need = [max([c - offset[r] + 1 for s, c in scored if s == r], default=0) for r in range(n_rows)]
    needed = [
        ((int(groups[r]), offset[r] * count_padding), real[r][: i + 1])
        for r in range(n_rows)
        for i in range(len(real[r]) if store_all else need[r])
    ]
    if not needed:
        assert len(stored) == 1
        return
    assert Counter(seen) == Counter(tokens for _, tokens in set(needed))
    assert layout.is_left_padded == any(offset[r] for r in range(n_rows) if real[r] and (store_all or need[r]))
    rows_of = Counter()
    for tokens, rows in zip(seen, layout.multiplicity.tolist(), strict=True):
        rows_of[tokens] += rows
    assert rows_of == Counter(tokens for _, tokens in needed)
    assert layout.unshared == len(needed)
