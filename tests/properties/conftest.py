"""Properties that hold for every supported trainer line, tested by the same tests.

The line under test is the installed one: `make test`, `make test-legacy` and `make test-openrlhf`
install one each.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

OPENRLHF = find_spec("openrlhf") is not None
if OPENRLHF:
    folder = Path(__file__).parents[1] / "openrlhf"
    sys.path[:0] = [str(folder), str(folder / "stand_ins")]


@pytest.fixture
def line():
    """The module of the installed trainer line: `tests.support.trl.line` or `lines_openrlhf`."""
    if OPENRLHF:
        import lines_openrlhf as module
    else:
        from tests.support.trl import line as module
    return module
