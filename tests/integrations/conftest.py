"""Fixtures of the trainer tests: one training, stock and patched, from the same initial state.

No patch outlives its test.
"""

import functools

import pytest

import fastdpo
from tests.support.trl.dpo import train_both


@pytest.fixture(autouse=True)
def _unpatched():
    yield
    fastdpo.unpatch()


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both, tmp_path)
