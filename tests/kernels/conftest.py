"""Keeps interpreted and compiled tests apart: Triton decides between them at import."""

import os

import interpreted_runs
import pytest

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_census.py", "test_interpreted.py", "executed"] if interpreted else ["interpreted"]

_started = {}


def pytest_collection_finish(session):
    """Starts the interpreted runs with the session. Most other tests use one core, and these take a minute or more."""
    if not interpreted and not session.config.option.collectonly:
        tests = [item for item in session.items if item.name.startswith("test_interpreted_kernels[")]
        names = [item.callspec.params["name"] for item in tests]
        _started.update(interpreted_runs.start(names, quick=session.config.getoption("quick")))


@pytest.fixture
def interpreted_run():
    """Waits for the run of a name."""
    return lambda name: _started[name].result()
