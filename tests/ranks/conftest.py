"""Trainings on several ranks. They run in `make test-ranks`, which installs DeepSpeed.

Without DeepSpeed these tests are not collected. Each test has a parameter `case`, a name of
`rank_cases.CASES`, and uses the fixture `ranks`. The cases of all collected tests are trained in
one launch of `RANKS` processes (an environment variable; default: 2).
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
    """Maps each case to the results of its ranks, or to the launch that did not finish it."""
    from rank_launch import run_cases

    specs = (getattr(item, "callspec", None) for item in request.session.items)
    names = dict.fromkeys(spec.params["case"] for spec in specs if spec and "case" in spec.params)
    return run_cases(list(names), number_of_ranks, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def ranks(case, trained) -> list[dict]:
    """The results of each rank in a case, as a dict by kind."""
    results = trained[case]
    if not isinstance(results, list):
        pytest.fail(f"case {case!r} was not finished; {results}", pytrace=False)
    return results
