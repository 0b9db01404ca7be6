"""`--quick` leaves out combinations of parameters and thorough tests, but no other test and no value of a parameter."""

import functools
import re
from itertools import product
from pathlib import Path

import pytest

from tests.support.programs.warm import run_program
from tests.support.selection import each_value_once

ROOT = Path(__file__).parents[1]
FILE = "tests/ops/test_packed_attention.py"  # tests of several parameters, of one, and of none


def grid(*sizes: int) -> list[dict[str, int]]:
    return [dict(zip("abcdef", values, strict=False)) for values in product(*map(range, sizes))]


@pytest.mark.parametrize(("sizes", "chosen"), [((7,), 7), ((3, 4), 4), ((2, 3, 2), 3), ((5, 5), 5), ((1, 1, 1), 1)])
def test_a_grid_is_reduced_to_its_longest_axis(sizes, chosen):
    assert len(each_value_once(grid(*sizes))) == chosen


def test_rows_of_several_values():
    rows = [dict(x=1, y="a"), dict(x=1, y="b"), dict(x=2, y="b"), dict(x=2, y="a")]
    assert each_value_once(rows) == [0, 2]


def test_equal_values_of_different_types_and_unhashable_values_are_distinct():
    assert each_value_once([dict(x=1), dict(x=True), dict(x=1.0), dict(x=[]), dict(x=[])]) == [0, 1, 2, 3, 4]


@functools.cache
def collected(*options: str) -> list[str]:
    done = run_program("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, FILE, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_test_of_a_file_is_kept():
    everything, quick = collected(), collected("--quick")
    assert set(quick) < set(everything)
    assert {case.split("[")[0] for case in quick} == {case.split("[")[0] for case in everything}
    assert len(quick) < len(everything) / 2


THOROUGH = """
import pytest

@pytest.mark.thorough
def test_slow(): ...

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_parameters(x): ...
"""


def test_thorough_tests_are_left_out(tmp_path):
    """Also one case of a test, with its values."""
    (tmp_path / "test_marked.py").write_text(THOROUGH)
    options = ("--collect-only", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", f"--confcutdir={ROOT}")
    found = [
        run_program("-m", "pytest", *options, *more, "-p", "conftest", tmp_path / "test_marked.py", cwd=ROOT / "tests")
        for more in ((), ("--quick",))
    ]
    cases = [re.findall(r"::(\S+)", done.stdout) for done in found]
    assert cases == [["test_slow", "test_parameters[1]", "test_parameters[2]"], ["test_parameters[1]"]]
