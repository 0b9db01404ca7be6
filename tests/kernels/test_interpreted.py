"""Runs kernel tests in Triton's interpreter instead of on a GPU."""

import re

import pytest

from tests.support.kernels.interpreted.runs import RUNS, run


@pytest.mark.parametrize("name", RUNS)
def test_interpreted_kernels(name, pytestconfig):
    pytest.importorskip("triton")
    quick = pytestconfig.getoption("quick")
    done = run(name, quick)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.fullmatch(r"(\d+) passed(, \d+ deselected)?(, \d+ warnings?)? in .*", done.stdout.splitlines()[-1])
    assert summary, done.stdout  # no test was skipped
    passed = int(summary[1])
    files, which = RUNS[name]
    if which:
        assert passed >= (20 if quick else 40), done.stdout
    else:  # every test function ran at least once
        sources = [path for folder in files for path in folder.glob("test_*.py")]
        assert passed >= sum(len(re.findall(r"^def test_", path.read_text(), re.M)) for path in sources) > 0, (
            done.stdout
        )
