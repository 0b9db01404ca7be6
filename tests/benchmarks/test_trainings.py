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
    for x in sides.values():
        assert len(x["step_seconds"]) == 3
        assert sum(x["first_step"].values()) == pytest.approx(x["step_seconds"][0])
        assert {"batches", "backward", "optimizer"} <= x["first_step"].keys()
        assert all(0 < seconds < x["step_seconds"][0] for seconds in x["first_step"].values())
    assert "probe" in sides["fastdpo"]["first_step"]
    assert "| backward" in printed
    assert all(name in printed for name in sides)
