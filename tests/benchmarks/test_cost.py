"""The command that compares the cost of batches with measured times."""

import numpy as np
import pytest

from benchmarks import cost


def test_the_command_runs(capsys, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")  # set by the benchmark, and restored after this test
    cost.main(["--quick", "--threads", "1"])
    printed = capsys.readouterr().out
    assert printed.startswith("3 batches of 3 pairs, ")
    assert "| CostModel.of_model |" in printed
    assert "| tokens alone " in printed


def test_errors_do_not_depend_on_the_unit_of_costs():
    costs, times = np.array([1.0, 2.0, 4.0]), np.array([0.5, 1.0, 2.0])
    assert cost.errors(costs, times) == pytest.approx(0)
    wrong = cost.errors(costs, times * np.array([1.0, 1.1, 1.0]))
    assert wrong.max() > 0.05
    assert wrong == pytest.approx(cost.errors(1e9 * costs, times * np.array([1.0, 1.1, 1.0])))
