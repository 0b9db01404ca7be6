"""Rows that begin alike come into one batch, and every row stays in its epoch and in its window."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from datasets import Dataset

from fastdpo.batching import Kinship, kinship_of
from fastdpo.prefix_tree import common_length


def tokens(n: int, draw: random.Random) -> list[int]:
    return [draw.randrange(30_000) for _ in range(n)]


def families(sizes: list[int], common: int = 60, own: int = 40, system: int = 0) -> list[list[int]]:
    """Rows of families of these sizes, in any order. All begin with a system prompt, then with that of their family."""
    draw = random.Random(0)
    first = tokens(system, draw)
    rows = [[*first, *beginning, *tokens(own, draw)] for n in sizes for beginning in [tokens(common, draw)] * n]
    return draw.sample(rows, len(rows))


def conversations(n: int, turns: int) -> list[list[int]]:
    """For each turn of a conversation, a row that begins with all of the row before."""
    draw = random.Random(0)
    rows = []
    for _ in range(n):
        row = []
        for _ in range(turns):
            row = [*row, *tokens(50, draw)]
            rows.append(row)
    return draw.sample(rows, len(rows))


def drawn(rows: list, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).permutation(len(rows)).tolist()


def distinct(rows: list[list[int]], order: list[int], size: int) -> int:
    """The nodes of the prefix trees of batches."""
    batches = [[rows[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
    return sum(len({tuple(row[: i + 1]) for row in batch for i in range(len(row))}) for batch in batches)


SHAPES = {
    "families": families([4, 3, 2, 2, 1, 4, 3, 1] * 6),
    "conversations": conversations(20, 6),
    "families under a system prompt": families([4, 3, 1] * 12, system=100),
    "a family larger than a batch": families([20, 3, 3, 3, 3]),
    "nothing in common": families([1] * 50),
    "a few of many": families([2] * 4 + [1] * 60),
}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_epoch_has_each_row_once(shape, window):
    rows = SHAPES[shape]
    order = Kinship(rows).grouped(drawn(rows), 8, window).tolist()
    assert Counter(order) == Counter(range(len(rows)))
    assert order == Kinship(rows).grouped(np.array(drawn(rows)), 8, window).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_have_fewer_distinct_tokens(shape):
    rows = SHAPES[shape]
    before = distinct(rows, drawn(rows), 8)
    after = distinct(rows, Kinship(rows).grouped(drawn(rows), 8).tolist(), 8)
    best = distinct(rows, sorted(range(len(rows)), key=rows.__getitem__), 8)
    assert after <= before
    assert after <= 1.04 * best, "as few as in sorted order, nearly"


def test_few_families_are_divided():
    rows = families([4, 3, 2, 2, 1, 4, 3, 1] * 6)
    batches = Kinship(rows).grouped(drawn(rows), 4).reshape(-1, 4).tolist()
    places = Counter(beginning for batch in batches for beginning in {tuple(rows[i][:60]) for i in batch})
    assert len(places) == 48
    assert sum(n > 1 for n in places.values()) <= 4


@pytest.mark.parametrize("system", [0, 200], ids=["nothing", "a system prompt"])
def test_an_order_stays_as_drawn_where_rows_have_the_same_relatives(system):
    """Questions that begin with the same word by chance, after the same long system prompt or after none."""
    draw = random.Random(0)
    first = tokens(system, draw)
    rows = [[*first, draw.randrange(3), draw.randrange(3), *tokens(30, draw)] for _ in range(203)]
    for seed in range(3):
        assert Kinship(rows).grouped(drawn(rows, seed), 8).tolist() == drawn(rows, seed)


def test_families_come_anywhere_in_an_epoch():
    """Large ones would come first if a family came where any of its rows was drawn."""
    rows = families([8] * 20 + [1] * 160)
    kinship, places = Kinship(rows), []
    sizes = Counter(tuple(row[:60]) for row in rows)
    large = [i for i, row in enumerate(rows) if sizes[tuple(row[:60])] == 8]
    for seed in range(60):
        order = kinship.grouped(drawn(rows, seed), 16)
        places.append(np.isin(order, large).nonzero()[0].mean() / (len(rows) - 1))
    assert np.mean(places) == pytest.approx(0.5, abs=0.03)


def test_a_row_stays_within_its_window():
    rows = families([5] * 40)
    order = drawn(rows)
    grouped = Kinship(rows).grouped(order, 4, 5).tolist()
    assert grouped != order
    before, after = (np.argsort(x) for x in (order, grouped))
    assert (before // 20 == after // 20).all(), "in windows of five batches of four rows"
    within = distinct(rows, grouped, 4)
    assert distinct(rows, Kinship(rows).grouped(order, 4).tolist(), 4) < within < distinct(rows, order, 4)


def test_sorted_rows_know_what_they_share():
    draw = random.Random(1)
    rows = [[draw.randrange(2) for _ in range(draw.randint(8, 20))] for _ in range(60)]
    kinship = Kinship(rows)
    some = drawn(rows)[:30]
    order, common = kinship.sorted(some)
    arrays = [np.array(rows[some[i]]) for i in order]
    expected = [0, *(common_length(a, b) for a, b in pairwise(arrays))]
    assert common.tolist() == expected


@pytest.mark.parametrize("rows", [[], [[]], [[], []], [[5]], [[5], [5], [5]]])
def test_few_and_empty_rows(rows):
    assert Kinship(rows).grouped(range(len(rows)), 2).tolist() == list(range(len(rows)))


def test_an_epoch_may_draw_a_row_twice_and_leave_others_out():
    rows = families([3] * 10)
    some = [1, 5, 1, 9, 28, 5]
    assert sorted(Kinship(rows).grouped(some, 4).tolist()) == sorted(some)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "size must be a positive integer"), ((2, 0), "window must be a positive integer or None")],
)
def test_malformed_arguments(arguments, message):
    with pytest.raises(ValueError, match=rf"^grouped: {message}; got 0"):
        Kinship([[1], [2]]).grouped([0, 1], *arguments)


def test_pairs_are_related_by_their_chosen_rows():
    rows = [{"prompt_ids": [5, 6], "chosen_ids": [i, i], "rejected_ids": [i]} for i in range(3)]
    rows += [{"prompt_ids": [], "chosen_ids": [5, 6, 7, 7], "rejected_ids": [0]}]
    for dataset in (rows, Dataset.from_list(rows)):
        order, common = kinship_of(dataset, op="test").sorted(range(4))
        assert order.tolist() == [0, 1, 2, 3]
        assert common.tolist() == [0, 2, 2, 2]
    with pytest.raises(ValueError, match=r"^test: dataset must have"):
        kinship_of([{"prompt_ids": []}], op="test")
