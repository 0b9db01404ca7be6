"""Fixtures of the trainer tests: one training, stock and patched, from the same initial state."""

import functools

import pytest
from trl_runs import train_both


@pytest.fixture
def both(tmp_path):
    return functools.partial(train_both, tmp_path)
