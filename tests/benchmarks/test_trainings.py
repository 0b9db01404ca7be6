"""Whole trainings, stock and patched."""

import pytest

from benchmarks import parts, trainings
from benchmarks.parts import COMPILING, PROBE, Clock

PROGRAM = """
import fastdpo
from benchmarks import trainings


def in_this_process(run, variables):
    fastdpo.unpatch()
    return run()


trainings.in_new_process = in_this_process
trainings.main(["--quick", "--steps", "3", "--threads", "1", "--json", {out!r}])
"""


def test_a_part_does_not_contain_those_within_it(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(parts, "now", lambda: float(next(ticks)))
    clock = Clock()
    inner = clock.timed(COMPILING, lambda: None)  # a second each

    def outer() -> None:
        inner()
        clock.timed(PROBE, inner)()

    clock.timed("the rest", outer)()
    assert clock.calls == {COMPILING: 2, PROBE: 1, "the rest": 1}
    assert clock.seconds == {COMPILING: 2.0, PROBE: 2.0, "the rest": 3.0}
    assert clock.seconds.total() == 7.0  # from the first tick to the last one


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
    assert PROBE in sides["fastdpo"]["first_step"]
    assert "| backward" in printed
    assert all(name in printed for name in sides)
