"""Units of a step that are cut by a budget of tokens: nothing is lost, and what begins alike stays together."""

import random

import numpy as np
import pytest

from fastdpo.integrations.trl.max_tokens.planning import COST_OF_A_RUN, UnitPlanner


def random_rows(draw: random.Random, n: int) -> list[np.ndarray]:
    """Rows of a few prompts, in any order. Completions may begin alike, be equal or be empty."""
    prompts = [[draw.randrange(9) for _ in range(draw.randint(1, 8))] for _ in range(draw.randint(1, 4))]
    return [np.array(draw.choice(prompts) + [draw.randrange(2) for _ in range(draw.randint(0, 6))]) for _ in range(n)]


def alone(rows: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Units of one row."""
    return [[row] for row in rows]


def distinct_tokens(units: list[list[np.ndarray]], share: bool = True) -> int:
    """The nodes of the prefix trees of the rows."""
    rows = [row for unit in units for row in unit]
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
        units = alone(random_rows(draw, draw.randint(1, 9)))
        planner, budget = UnitPlanner(units, share=share), draw.randint(5, 60)
        runs = planner.cut(budget)
        assert sorted(i for run in runs for i in planner.units(run)) == list(range(len(units)))

        def tokens(run, planner=planner, units=units):
            return distinct_tokens([units[i] for i in planner.units(run)], share)

        def quality(runs, tokens=tokens, budget=budget):
            sizes = [tokens(run) for run in runs]
            return len(runs) * budget * COST_OF_A_RUN + sum(sizes), sum(size**2 for size in sizes)

        assert [planner.tokens(*run) for run in runs] == [tokens(run) for run in runs]
        fitting = [x for x in all_partitions(len(units)) if all(b - a == 1 or tokens((a, b)) <= budget for a, b in x)]
        assert quality(runs) == min(map(quality, fitting))


def test_relatives_are_neighbours():
    """Any other order of the rows has at least as many tokens that are not in the row before."""
    draw = random.Random(1)
    for _ in range(50):
        units = alone(random_rows(draw, 12))
        (run,) = UnitPlanner(units).cut(10**6)
        assert UnitPlanner(units).tokens(*run) == distinct_tokens(units)


def test_dividing():
    """Runs are divided where prompts change, if they do, until there are enough."""
    rows = [np.append(np.full(5, prompt), np.arange(i)) for prompt in range(3) for i in (1, 2, 3, 4)]
    planner = UnitPlanner(alone(rows))
    runs = planner.cut(10**6)
    assert runs == [(0, 12)]
    assert planner.divided(runs, 1) == runs
    assert planner.divided(runs, 3) == [(0, 4), (4, 8), (8, 12)]
    assert planner.divided(runs, 12) == [(i, i + 1) for i in range(12)]


@pytest.mark.parametrize("n", [1, 64])
def test_equal_rows_are_even(n):
    rows = [np.append(prompt, np.arange(9)) for prompt in range(n)]
    sizes = [end - start for start, end in UnitPlanner(alone(rows)).cut(190)]
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-n // 19)


def test_pairs_count_what_they_share():
    """Never less than what is computed. Exactly that where the pairs of a prompt have nothing else in common."""
    draw = random.Random(2)
    for _ in range(50):
        rows = random_rows(draw, 24)
        units = [[a, b] for a, b in zip(rows[::2], rows[1::2], strict=True)]
        planner = UnitPlanner(units)
        for run in planner.cut(draw.randint(20, 60)):
            pairs = [units[i] for i in planner.units(run)]
            assert distinct_tokens(pairs) <= planner.tokens(*run) <= sum(distinct_tokens([pair]) for pair in pairs)
    prompts = [np.full(5, i) for i in range(3)]
    units = [[np.append(prompts[i % 3], [100 + 2 * i + j]) for j in range(2)] for i in range(9)]
    runs = (planner := UnitPlanner(units)).cut(20)
    assert [planner.tokens(*run) for run in runs] == [5 + 6] * 3
    assert UnitPlanner(units[:1], share=False).tokens(0, 1) == 12


def test_kinds_stay_apart():
    draw = random.Random(3)
    units = alone(random_rows(draw, 12))
    kinds = [i % 3 for i in range(12)]
    planner = UnitPlanner(units, kinds)
    runs = planner.cut(10**6)
    assert [sorted({kinds[i] for i in planner.units(run)}) for run in runs] == [[0], [1], [2]]
    assert [planner.tokens(*run) for run in runs] == [distinct_tokens(units[kind::3]) for kind in range(3)]
