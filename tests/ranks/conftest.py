"""Trainings on several ranks, run by `make test-ranks`, which installs DeepSpeed; elsewhere they are left out.

A test takes a parameter `case`, a name of `rank_cases.CASES`, and the fixture `ranks`. The cases of all the tests that
were collected are trained in one launch of `RANKS` processes (an environment variable; 2 unless it is set).
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if find_spec("deepspeed") else ["test_*.py"]
sys.path[:0] = [str(HERE)]


@pytest.fixture(scope="session")
def number_of_ranks() -> int:
    return int(os.environ.get("RANKS", "2"))


@pytest.fixture(scope="session")
def trained(request, tmp_path_factory, number_of_ranks):
    """Results of each case, or how its launch ended."""
    from rank_launch import run_cases

    specs = (getattr(item, "callspec", None) for item in request.session.items)
    names = dict.fromkeys(spec.params["case"] for spec in specs if spec and "case" in spec.params)
    return run_cases(list(names), number_of_ranks, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def ranks(case, trained) -> list[dict]:
    """Results of a case by kind, one dictionary of each rank."""
    done = trained[case]
    if not isinstance(done, list):
        pytest.fail(f"case {case!r} was not finished; {done}", pytrace=False)
    return done
