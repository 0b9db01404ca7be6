"""Rows of a step that are cut by a budget of tokens: nothing is lost, and what begins alike stays together."""

import random

import numpy as np
import pytest

from fastdpo.batching.rows import COST_OF_A_RUN, RowPlanner


def random_rows(draw: random.Random, n: int) -> list[np.ndarray]:
    """Rows of a few prompts, in any order. Completions may begin alike, be equal or be empty."""
    prompts = [[draw.randrange(9) for _ in range(draw.randint(1, 8))] for _ in range(draw.randint(1, 4))]
    return [np.array(draw.choice(prompts) + [draw.randrange(2) for _ in range(draw.randint(0, 6))]) for _ in range(n)]


def distinct_tokens(rows: list[np.ndarray], share: bool) -> int:
    """The nodes of the prefix trees of the rows."""
    if not share:
        return sum(map(len, rows))
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def all_partitions(n: int) -> list[list[tuple[int, int]]]:
    """All ways to cut n rows into runs."""
    cuts = [[i for i in range(1, n) if bits >> (i - 1) & 1] for bits in range(2 ** (n - 1))]
    return [list(zip([0, *each], [*each, n], strict=True)) for each in cuts]


@pytest.mark.parametrize("share", [True, False])
def test_cuts_are_the_best_ones(share):
    """Compared with all ways to cut the sorted rows. The budget may be below the longest row."""
    draw = random.Random(0)
    for _ in range(60):
        rows = random_rows(draw, draw.randint(1, 9))
        planner, budget = RowPlanner(rows, share=share), draw.randint(5, 60)
        runs = planner.cut(budget)
        assert sorted(i for run in runs for i in planner.rows(run)) == list(range(len(rows)))

        def tokens(run, planner=planner, rows=rows):
            return distinct_tokens([rows[i] for i in planner.rows(run)], share)

        def quality(runs, tokens=tokens, budget=budget):
            sizes = [tokens(run) for run in runs]
            return len(runs) * budget * COST_OF_A_RUN + sum(sizes), sum(size**2 for size in sizes)

        assert [planner.tokens(*run) for run in runs] == [tokens(run) for run in runs]
        fitting = [x for x in all_partitions(len(rows)) if all(b - a == 1 or tokens((a, b)) <= budget for a, b in x)]
        assert quality(runs) == min(map(quality, fitting))


def test_relatives_are_neighbours():
    """Any other order of the rows has at least as many tokens that are not in the row before."""
    draw = random.Random(1)
    for _ in range(50):
        rows = random_rows(draw, 12)
        (run,) = RowPlanner(rows).cut(10**6)
        assert RowPlanner(rows).tokens(*run) == distinct_tokens(rows, True)


def test_dividing():
    """Runs are divided where prompts change, if they do, until there are enough."""
    rows = [np.append(np.full(5, prompt), np.arange(i)) for prompt in range(3) for i in (1, 2, 3, 4)]
    planner = RowPlanner(rows)
    runs = planner.cut(10**6)
    assert runs == [(0, 12)]
    assert planner.divided(runs, 1) == runs
    assert planner.divided(runs, 3) == [(0, 4), (4, 8), (8, 12)]
    assert planner.divided(runs, 12) == [(i, i + 1) for i in range(12)]


@pytest.mark.parametrize("n", [1, 64])
def test_equal_rows_are_even(n):
    rows = [np.append(prompt, np.arange(9)) for prompt in range(n)]
    sizes = [end - start for start, end in RowPlanner(rows).cut(190)]
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-n // 19)
