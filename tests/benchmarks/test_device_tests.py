"""`benchmarks.device_tests` runs tests in several processes, and says what it does."""

import re
import time
from types import SimpleNamespace

import pytest

from benchmarks import device_tests

OPTIONS = ("--device", "cpu", "--quick")
FILE = "tests/ops/test_head_budget.py"  # few tests, which are fast


CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--device")
    parser.addoption("--shard")
    parser.addoption("--quick", action="store_true")
"""
"""The options that `device_tests` gives each process."""


SLOW = """
import time


def test_passes():
    pass


def test_fails():
    raise AssertionError


def test_takes_a_minute():
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def few_tests_and_short_turns(monkeypatch):
    assert FILE.startswith(f"{device_tests.TESTS[0]}/")
    monkeypatch.setattr(device_tests, "TESTS", (FILE,))
    monkeypatch.setattr(device_tests, "SECONDS", 0.2)


def test_the_processes_run_all_tests_once(tmp_path, capsys):
    logs = ("--logs", str(tmp_path))
    assert device_tests.main([*OPTIONS, "--jobs", "2", *logs, "-k", "test_tiles_take_256 or large_gpu"]) == 0
    runs = [re.findall(r"^\S*::(\S+) PASSED", log.read_text(), re.M) for log in sorted(tmp_path.iterdir())]
    assert len(runs) == 2
    assert all(runs)
    assert len({*runs[0], *runs[1]}) == len(runs[0]) + len(runs[1]) == 6
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("tests: 6 tests done, 0 failed, ")


@pytest.mark.parametrize(
    ("options", "shown"), [(["--unknown"], "unrecognized arguments: --unknown"), (["-k", "no_such_test"], "")]
)
def test_a_process_that_fails_is_shown_and_running_nothing_is_a_failure(options, shown, tmp_path, capsys, monkeypatch):
    """With a file of tests and a conftest that import nothing."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "pytest.ini").touch()
    monkeypatch.setattr(device_tests, "TESTS", (str(tmp_path),))
    logs = ("--logs", str(tmp_path / "logs"))
    assert device_tests.main([*OPTIONS, "--jobs", "1", *logs]) == 0
    assert device_tests.main([*OPTIONS, "--jobs", "1", *logs, *options]) == 1
    assert shown in capsys.readouterr().out


def test_a_process_ends_in_time_and_shows_what_has_failed(tmp_path, capsys, monkeypatch):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(SLOW)
    (tmp_path / "pytest.ini").touch()
    monkeypatch.setattr(device_tests, "TESTS", (str(tmp_path),))
    log = tmp_path / "logs" / "tests-0.log"
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: float(log.exists() and "FAILED" in log.read_text()))
    monkeypatch.setattr(device_tests, "time", clock)
    assert device_tests.main([*OPTIONS, "--jobs", "1", "--logs", str(tmp_path / "logs"), "--seconds", "1"]) == 1
    printed = capsys.readouterr().out
    assert re.search("tests-0.log, exit status -9:\n.*::test_fails FAILED", printed)
    assert "test_passes" not in printed
