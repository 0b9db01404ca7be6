"""Unwinds a running block on SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Unwinds the block on SIGTERM, so that its `finally` clauses run, and then lets the signal
    end the process.

    Schedulers send SIGTERM some time before they kill a job. A handler that is already installed
    stays in place.
    """
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    received = False

    def unwind(*_: object) -> None:
        nonlocal received
        if not received:  # a launcher may repeat the scheduler's signal
            received = True
            raise SystemExit

    try:
        try:
            signal.signal(signal.SIGTERM, unwind)
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    finally:  # the signal may arrive inside the inner block
        if received:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
