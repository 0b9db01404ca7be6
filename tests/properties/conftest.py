"""Properties that every supported trainer line must have: the same tests for each of them.

Which line that is, is what is installed: `make test`, `make test-legacy`, `make test-openrlhf`.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

OPENRLHF = find_spec("openrlhf") is not None
if OPENRLHF:
    folder = Path(__file__).parents[1] / "openrlhf"
    sys.path[:0] = [str(folder), str(folder / "stand_ins")]
    collect_ignore = ["test_online_dpo.py"]  # it has no such trainer


@pytest.fixture
def line():
    """The trainer line that is installed, as a module: see `lines_trl.py` and `lines_openrlhf.py`."""
    if OPENRLHF:
        import lines_openrlhf as module
    else:
        import lines_trl as module
    return module


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    import fastdpo

    fastdpo.unpatch()
