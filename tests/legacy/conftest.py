"""Tests for TRL < 0.29, which `make test-legacy` installs. Other versions do not collect them."""

import functools
from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.support.trl.dpo import train_both

collect_ignore_glob = [] if Version(version("trl")) < Version("0.29") else ["test_*.py"]


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both, tmp_path)
