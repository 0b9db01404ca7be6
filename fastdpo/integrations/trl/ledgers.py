"""The ledgers of deferred metrics in the states of TRL's trainers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..ledger import Ledger
from ..protocol import STATE


def ledger_of(trainer: Any) -> Ledger | None:
    """The ledger of a trainer, or None for one that has none: not patched, or patched by the trainer
    line of a subclass.
    """
    return getattr(vars(trainer).get(STATE), "ledger", None)


def discard_states(trainers: Iterable[Any]) -> None:
    """Removes the states of trainers, which then hold plain numbers."""
    for trainer in list(trainers):
        ledger = ledger_of(trainer)
        vars(trainer).pop(STATE, None)
        if ledger is not None:
            ledger.close(trainer)
