"""The tests of TRL before its rewrite are run by `make test-legacy`, which installs it; elsewhere they are left out."""

import functools
from importlib.metadata import version

import pytest
from packaging.version import Version
from trl_runs import train_both

collect_ignore_glob = [] if Version(version("trl")) < Version("0.29") else ["test_*.py"]


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both, tmp_path)
