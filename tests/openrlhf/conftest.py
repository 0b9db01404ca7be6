"""Tests of OpenRLHF. They run in `make test-openrlhf`, which installs it.

Without OpenRLHF they are not collected.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import extensions

HERE = Path(__file__).parent
collect_ignore_glob = [] if find_spec("openrlhf") else ["test_*.py"]
sys.path[:0] = [str(HERE), str(HERE / "stand_ins")]


@pytest.fixture(autouse=True, scope="session")
def _extensions():
    extensions.keep_in_environment()
