"""Rows share what they begin with, except pieces that save little."""

import numpy as np
import pytest

from fastdpo.prefix_tree import prefix_tree


def branches(*rows, groups=None):
    """(parent, shared) of rows, given as strings with one token a letter."""
    arrays = [np.array([*row.encode()], dtype=np.int64) for row in rows]
    tree = prefix_tree(arrays, groups or [0] * len(rows))
    for i, branch in enumerate(tree):
        parent = tree[branch.parent]
        assert branch.parent < i or branch == (i, 0, i)
        assert branch.root == (parent.root if branch.shared else i)
        assert rows[i][: branch.shared] == rows[branch.parent][: branch.shared]
    return [(branch.parent, branch.shared) for branch in tree]


LONG = "".join(map(chr, range(ord("0"), ord("0") + 70)))

KNOWN = {
    "one row": (["abc"], [(0, 0)]),
    "no common beginning": (["abc", "xyz", ""], [(0, 0), (1, 0), (2, 0)]),
    "pairs": (["promptA", "other1", "promptB", "other2"], [(0, 0), (1, 0), (0, 6), (1, 5)]),
    "equal rows": (["same", "same", "same"], [(0, 0), (0, 4), (1, 4)]),
    "rows that begin each other": (["turn", "turn one", "tu"], [(0, 0), (0, 4), (0, 2)]),
    "the most in common": (["abcd", "abxy", "abxz"], [(0, 0), (0, 2), (1, 3)]),
    "prompts behind a header": (["header1a", "header2a", "header1b", "header2b"], [(0, 0), (0, 6), (0, 7), (1, 7)]),
    "a short header before long prompts": (
        ["h1" + LONG + "a", "h2" + LONG + "a", "h1" + LONG + "b", "h2" + LONG + "b"],
        [(0, 0), (1, 0), (0, 72), (1, 72)],  # the header is stored twice
    ),
    "a short prompt before long answers": (["p" + LONG, "p" + LONG[::-1]], [(0, 0), (0, 1)]),
    "answers that begin alike by chance": (
        ["prompt" + "a", "prompt" + "T" + LONG, "prompt" + "T" + LONG[::-1]],
        [(0, 0), (0, 6), (1, 6)],  # not the T, which would be a second piece
    ),
}


@pytest.mark.parametrize(("rows", "expected"), KNOWN.values(), ids=KNOWN)
def test_known_rows(rows, expected):
    assert branches(*rows) == expected


def test_rows_of_different_groups_share_nothing():
    rows = ["same one", "same two", "same one", "same six"]
    assert branches(*rows, groups=[1, 0, 0, 1]) == [(0, 0), (1, 0), (1, 5), (0, 5)]


def test_ids_of_several_bytes():
    rows = [np.array(row, dtype=np.int64) for row in ([256, 1], [1, 256], [256, 2], [1, 0])]
    assert [(parent, shared) for parent, shared, _ in prefix_tree(rows, [0] * 4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_many_rows_that_begin_each_other():
    assert branches(*("a" * n for n in range(1, 2001))) == [(0, 0), *((n, n + 1) for n in range(1999))]
