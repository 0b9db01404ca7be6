"""Trainings on several ranks. They run in `make test-ranks`, which installs DeepSpeed.

Without DeepSpeed these tests are not collected. Each test has a parameter `case`, a name of
`rank_cases.CASES`, or parameters `engine` and `what`, which make such a name, and uses the fixture
`ranks`; a test that compares cases has a parameter `cases` and uses `ranks_of`. The cases of all
collected tests are trained in one launch of `RANKS` processes (an environment variable; default: 2),
those that need another number of ranks in one more.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import extensions

HERE = Path(__file__).parent
collect_ignore_glob = [] if find_spec("deepspeed") else ["test_*.py"]
sys.path[:0] = [str(HERE)]


@pytest.fixture(autouse=True, scope="session")
def _extensions():
    extensions.keep_in_environment()


@pytest.fixture(scope="session")
def number_of_ranks() -> int:
    return int(os.environ.get("RANKS", "2"))


@pytest.fixture(scope="session")
def trained(request, tmp_path_factory, number_of_ranks):
    """Maps each case to the results of its ranks, or to the launch that did not finish it."""
    from rank_cases import CASES
    from rank_launch import run_cases

    tests = [item for item in request.session.items if hasattr(item, "callspec")]
    launches = defaultdict(list)
    for name in dict.fromkeys(name for test in tests for name in _names(test.callspec.params)):
        launches[CASES[name].ranks or number_of_ranks].append(name)
    results = {}
    for ranks, cases in launches.items():
        results |= run_cases(cases, ranks, tmp_path_factory.mktemp("ranks"))
    return results


@pytest.fixture
def ranks_of(trained) -> Callable[[str], list[dict]]:
    """Maps a case to the results of each rank, as a dict by kind."""

    def finished(case: str) -> list[dict]:
        results = trained[case]
        if not isinstance(results, list):
            pytest.fail(f"case {case!r} was not finished; {results}", pytrace=False)
        return results

    return finished


def _names(params: dict[str, Any]) -> list[str]:
    """The cases that a test with these parameters needs."""
    if "engine" in params:
        return [_name(params["engine"], params["what"])]
    return [*params.get("cases", ()), *filter(None, [params.get("case")])]


def _name(engine: str, what: str) -> str:
    return f"{engine} {what}"


@pytest.fixture
def case(engine, what) -> str:
    return _name(engine, what)


@pytest.fixture
def ranks(case, ranks_of) -> list[dict]:
    return ranks_of(case)
