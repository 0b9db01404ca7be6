"""The mixer that runs on packed tokens now.

The functions that a mixer calls are not told which mixer calls them, so its hooks leave here what
they need. Dynamo does not trace this state, so compiled models must read and write it outside of
their graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import nn

from .segments import Segments


@dataclass
class RunningMixer:
    """A mixer while it runs.

    Attributes:
        segments: of its packed tokens.
        expected: the names of the known functions in its forward. None of them: it runs on whole rows.
        called: the names of those that it has called.
    """

    segments: Segments
    expected: frozenset[str]
    called: set[str] = field(default_factory=set)


_running = threading.local()
_witnessed: ContextVar[set[nn.Module] | None] = ContextVar("fastdpo_witnessed_mixers", default=None)


def running() -> RunningMixer | None:
    """The mixer that runs in this thread, which in a backward pass may be another one."""
    return getattr(_running, "mixer", None)


def begin(mixer: RunningMixer) -> None:
    _running.mixer = mixer


def end() -> RunningMixer | None:
    """The mixer that ran until now."""
    mixer = running()
    _running.mixer = None
    return mixer


def record(module: nn.Module) -> None:
    """Notes that a mixer has run on packed tokens."""
    recorded = _witnessed.get()
    if recorded is not None:
        recorded.add(module)


@contextmanager
def witness(recorded: set[nn.Module]) -> Iterator[None]:
    """Adds the mixers that run on packed tokens in the block to a set."""
    token = _witnessed.set(recorded)
    try:
        yield
    finally:
        _witnessed.reset(token)
