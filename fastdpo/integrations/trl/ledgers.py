"""The ledgers of deferred metrics in the states of TRL's trainers."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from ..deferred_metrics import Ledger
from ..protocol import STATE


def ledger_of(trainer: Any) -> Ledger | None:
    """The ledger of a trainer, or None for one that has none: not patched, or patched by the trainer
    line of a subclass.
    """
    return getattr(vars(trainer).get(STATE), "ledger", None)


def discard_states(trainers: WeakSet[Any]) -> None:
    """Removes the states of trainers, which then hold plain numbers. Empties the set."""
    for trainer in list(trainers):
        ledger = ledger_of(trainer)
        vars(trainer).pop(STATE, None)
        if ledger is not None:
            ledger.close(trainer)
    trainers.clear()
