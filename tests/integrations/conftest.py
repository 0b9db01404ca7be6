"""What the tests of a budget of tokens count."""

import pytest

from fastdpo.models import calls as counters


@pytest.fixture
def computed(monkeypatch):
    """The packed tokens of every call of a model."""
    tokens, count = [], counters.count_tokens
    monkeypatch.setattr(counters, "count_tokens", lambda *args: (tokens.append(args[-1]), count(*args)))
    return tokens
