"""A device that reports its memory to `max_tokens="auto"`, which models take by the tokens that they compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastdpo.integrations.trl.max_tokens import learned_tokens
from fastdpo.models import calls as counters
from fastdpo.ops import memory
from fastdpo.ops.memory import MemoryReport

WEIGHTS = 1000
"""Bytes of weights, gradients and states of the optimizer."""


class DeviceMemory:
    """The memory of a device.

    Args:
        monkeypatch: plants it.
        total: bytes.
        taken: the bytes of a call of a model, by its tokens.
        foreign: a peak that something else has caused.
        useful: tokens from which larger micro-batches gain nothing.

    Attributes:
        computed: the tokens of each call.
        peak: in bytes.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        total: int,
        taken: Callable[[int], int] = lambda tokens: 10 * tokens,
        foreign: int = 0,
        useful: int = 10_000,
    ):
        self.total, self.computed, self.peak = total, [], foreign
        count = counters.count_tokens

        def counting(*args) -> None:
            self.computed.append(args[-1])
            self.peak = max(self.peak, WEIGHTS + taken(args[-1]))
            count(*args)

        monkeypatch.setattr(counters, "count_tokens", counting)
        monkeypatch.setattr(memory, "report", lambda device: MemoryReport(WEIGHTS, self.peak, 0, self.total))
        monkeypatch.setattr(learned_tokens, "USEFUL_ON_CPU", useful)
