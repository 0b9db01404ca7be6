"""Tests for TRL 0.29 to 1.14, which `make test-trl-versions` installs. Other versions do not collect them."""

import functools
from importlib.metadata import version

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.trl.dpo import train_both

collect_ignore_glob = [] if version("trl") in SpecifierSet(">=0.29,<1.15") else ["test_*.py"]


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both, tmp_path)


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    import fastdpo

    fastdpo.unpatch()
