"""Predicted memory of a step against the measured peak of a training in TRL."""

from dataclasses import replace

import pytest

from benchmarks.predicted_memory import Case, compare_in_new_process, predict

ALLOWED = 0.15
SIDES = [
    (Case(pairs=2), False),
    (Case(pairs=4), True),
    (Case(pairs=4, checkpointing=True, lora=True), True),
    (Case(pairs=6, rewards=True), True),
]
MORE_SIDES = [
    (Case(pairs=4, rewards=True), False),
    (Case(pairs=4, checkpointing=True), True),
    (Case(pairs=6, lora=True), True),
    (Case(pairs=8, rewards=True, checkpointing=True, lora=True), True),
    (Case("gemma2", pairs=4), True),
    (Case("Falcon-H1", pairs=4), True),
]


@pytest.fixture(scope="module")
def comparisons(pytestconfig):
    """One process trains all of them."""
    sides = SIDES if pytestconfig.getoption("quick") else SIDES + MORE_SIDES
    return dict(zip(sides, compare_in_new_process(*sides), strict=True))


@pytest.mark.parametrize("side", [*SIDES, *(pytest.param(x, marks=pytest.mark.thorough) for x in MORE_SIDES)], ids=str)
def test_predicted_memory_is_close_to_the_measured_peak(side, comparisons):
    assert abs(comparisons[side].error) < ALLOWED, comparisons[side]


@pytest.mark.parametrize("change", [{"checkpointing": True}, {"pairs": 2}, {"lora": True}, {"rewards": True}])
def test_the_memory_of_another_training_would_not_pass(change, comparisons):
    case, patched = SIDES[1]
    wrong = predict(replace(case, **change), patched)
    assert abs(wrong / comparisons[SIDES[1]].measured - 1) > ALLOWED
