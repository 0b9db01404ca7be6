"""Keeps interpreted and compiled tests apart: Triton decides between them at import."""

import os
from functools import partial

import pytest

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = ["test_census.py", "test_interpreted.py"] if interpreted else ["interpreted"]


@pytest.fixture
def installed(monkeypatch):
    """Installs stand-ins of some versions of libraries, or with faults, which support the CPU."""
    from tests.support.stand_ins import flash_libraries  # after Triton was told whether to interpret

    yield partial(flash_libraries.install, monkeypatch)
    flash_libraries.forget()
