"""The contract of every trainer: tests of what each of them keeps, over one description of each."""

import warnings
from contextlib import nullcontext

import pytest

from tests.contract.harness import Harness
from tests.support import extensions


def pytest_collection_modifyitems(config, items):
    """Leaves out tests of what no trainer of this environment has."""
    empty = [item for item in items if "empty parameter set" in str([x.kwargs for x in item.own_markers])]
    config.hook.pytest_deselected(items=empty)
    items[:] = [item for item in items if item not in empty]


@pytest.fixture(autouse=True, scope="session")
def _extensions():
    extensions.keep_in_environment()


@pytest.fixture(autouse=True)
def _deprecated_options():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.fixture(autouse=True)
def _setting(request, tmp_path):
    """What the trainer of a test needs around it. No patch outlives the test."""
    import fastdpo

    parameters = getattr(request.node, "callspec", None)
    given = next(iter(parameters.params.values()), None) if parameters else None
    harness = given if isinstance(given, Harness) else getattr(given, "harness", None)
    with harness.setting(tmp_path / "setting") if harness is not None else nullcontext():
        yield
        fastdpo.unpatch()
