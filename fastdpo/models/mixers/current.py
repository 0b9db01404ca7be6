"""The mixer that runs on packed tokens now, and the record of what has run.

The functions that a mixer calls are not told which mixer calls them, so its hooks leave here what
they need. Dynamo does not trace this state, so compiled models must read and write it outside of
their graphs.
"""

from __future__ import annotations

import threading
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


@dataclass
class Witness:
    """Counts of attention calls, and the arguments that came with them.

    Attributes:
        layouts: number of calls with a layout.
        others: number of calls without one.
        windows: values of `sliding_window`.
        dropout: the largest dropout of attention weights.
        mixers: the mixers that ran on packed tokens.
    """

    layouts: int = 0
    others: int = 0
    windows: set[int | None] = field(default_factory=set)
    dropout: float = 0.0
    mixers: set[nn.Module] = field(default_factory=set)


_running = threading.local()

witness: ContextVar[Witness | None] = ContextVar("fastdpo_witness", default=None)
"""What records the calls of attention and of mixers now."""


def mixer() -> RunningMixer | None:
    """The mixer that runs in this thread, which in a backward pass may be another one."""
    return getattr(_running, "mixer", None)


def begin(running: RunningMixer) -> None:
    _running.mixer = running


def end() -> RunningMixer | None:
    """The mixer that ran until now."""
    ran = mixer()
    _running.mixer = None
    return ran


def record(module: nn.Module) -> None:
    """Notes that a mixer has run on packed tokens."""
    recorded = witness.get()
    if recorded is not None:
        recorded.mixers.add(module)
