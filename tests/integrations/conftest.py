"""What the tests of a budget of tokens count."""

import pytest

from fastdpo.models import calls as counters
from tests.support.recorded_calls import recorded_calls


@pytest.fixture
def computed(monkeypatch):
    """The packed tokens of every call of a model."""
    return recorded_calls(monkeypatch, counters, "count_tokens", lambda result, *args: args[-1])
