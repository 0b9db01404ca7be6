"""Tests of LLaMA-Factory. They run in `make test-llamafactory`, which installs it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def both(tmp_path):
    """A function that trains stock, then patched, by `llamafactory_runs.train_both`."""
    from llamafactory_runs import train_both

    return lambda *args, **options: train_both(tmp_path, *args, **options)
