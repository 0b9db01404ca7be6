"""Rows are grouped by what they begin with, so that few tokens are stored."""

import random

import numpy as np
import pytest

from fastdpo.prefix_groups import groups_by_content


def grouped(*rows):
    """The groups of rows, given as strings with one token a letter."""
    return groups_by_content([np.array([*row.encode()], dtype=np.int64) for row in rows])


def stored(rows, groups):
    """The tokens of rows whose groups store their common prefix once."""
    total = 0
    for group in set(groups):
        members = [row for row, each in zip(rows, groups, strict=True) if each == group]
        common = 0
        while all(len(row) > common and row[common] == members[0][common] for row in members):
            common += 1
        total += sum(len(row) for row in members) - (len(members) - 1) * common
    return total


def partitions(rows):
    """All ways to divide a number of rows into groups."""
    if not rows:
        yield []
        return
    for groups in partitions(rows - 1):
        for group in {*groups, rows - 1}:
            yield [*groups, group]


KNOWN = {
    "one row": (["abc"], [0]),
    "no common beginning": (["abc", "xyz", ""], [0, 1, 2]),
    "pairs": (["promptA", "other1", "promptB", "other2"], [0, 1, 0, 1]),
    "four answers": (["prompt1", "prompt2", "prompt3", "prompt4"], [0, 0, 0, 0]),
    "equal rows": (["same", "same", "same"], [0, 0, 0]),
    "a row that begins another": (["turn", "turn one"], [0, 0]),
    "long prompts behind a short header": (["hlong1", "hlong2", "hother1", "hother2"], [0, 0, 2, 2]),
    "short prompts behind a long header": (["header1a", "header1b", "header2a", "header2b"], [0, 0, 0, 0]),
    "rows without partners join at the header": (["hlong1", "hx", "hlong2", "hy"], [0, 1, 0, 1]),
}


@pytest.mark.parametrize(("rows", "groups"), KNOWN.values(), ids=KNOWN)
def test_known_rows(rows, groups):
    assert grouped(*rows) == groups


def test_few_tokens_are_stored():
    """Never more than alone, and in nearly all random cases as few as in the best of all groups."""
    rng = random.Random(0)
    best = 0
    for _ in range(300):
        rows = []
        for _ in range(rng.randint(1, 5)):
            beginning = rng.choice(rows)[: rng.randint(0, 8)] if rows and rng.random() < 0.8 else ""
            rows.append(beginning + "".join(rng.choices("abc", k=rng.randint(1, 8))))
        tokens = stored(rows, grouped(*rows))
        assert tokens <= sum(map(len, rows))
        best += tokens == min(stored(rows, groups) for groups in partitions(len(rows)))
    assert best >= 0.97 * 300


def test_ids_of_several_bytes():
    rows = [np.array(row, dtype=np.int64) for row in ([256, 1], [1, 256], [256, 2], [1, 0])]
    assert groups_by_content(rows) == [0, 1, 0, 1]


def test_many_rows_that_begin_each_other():
    assert len(set(grouped(*("a" * n for n in range(1, 2001))))) < 100
