"""Whole trainings, stock and patched."""

import json

import pytest

from benchmarks import trainings
from tests.support.programs.warm import run_program

PROGRAM = """
import fastdpo
from benchmarks import trainings


def in_this_process(run, variables):
    fastdpo.unpatch()
    return run()


trainings.in_new_process = in_this_process
trainings.main(["--quick", "--steps", "3", "--threads", "1", "--json", {out!r}])
"""


def test_the_command(tmp_path):
    """All sides train the same numbers."""
    path, out = tmp_path / "program.py", tmp_path / "trainings.json"
    path.write_text(PROGRAM.format(out=str(out)))
    done = run_program(path)
    assert done.returncode == 0, done.stderr
    sides = json.loads(out.read_text())["sides"]
    assert list(sides) == list(trainings.SIDES)
    stock, *others = ([log for log in x["logs"] if log.keys() & {"loss", "eval_loss"}] for x in sides.values())
    assert len(stock) == 4
    for logs in others:
        for log, expected in zip(logs, stock, strict=True):
            for name in log.keys() & {"loss", "eval_loss", "grad_norm", "rewards/margins", "eval_rewards/margins"}:
                assert log[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert all(len(x["step_seconds"]) == 3 for x in sides.values())
    assert all(name in done.stdout for name in sides)
