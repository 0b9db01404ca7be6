"""Whole trainings, stock and patched."""

import pytest

from benchmarks import trainings

PROGRAM = """
import fastdpo
from benchmarks import trainings


def in_this_process(run, variables):
    fastdpo.unpatch()
    return run()


trainings.in_new_process = in_this_process
trainings.main(["--quick", "--steps", "3", "--threads", "1", "--json", {out!r}])
"""


def test_the_command(measured):
    """All sides train the same numbers."""
    result, printed = measured(PROGRAM)
    sides = result["sides"]
    assert list(sides) == list(trainings.SIDES)
    stock, *others = ([log for log in x["logs"] if log.keys() & {"loss", "eval_loss"}] for x in sides.values())
    assert len(stock) == 4
    for logs in others:
        for log, expected in zip(logs, stock, strict=True):
            for name in log.keys() & {"loss", "eval_loss", "grad_norm", "rewards/margins", "eval_rewards/margins"}:
                assert log[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert all(len(x["step_seconds"]) == 3 for x in sides.values())
    assert all(name in printed for name in sides)
