"""The ledgers of deferred metrics in the states of TRL's trainers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..deferred_metrics import Ledger
from ..protocol import STATE


def ledger_of(trainer: Any) -> Ledger | None:
    """The ledger of a trainer, or None for one that is not patched."""
    state = vars(trainer).get(STATE)
    return None if state is None else state.ledger


def discard_states(trainers: Iterable[Any]) -> None:
    """Removes the states of trainers, which then hold plain numbers."""
    for trainer in list(trainers):
        ledger = ledger_of(trainer)
        vars(trainer).pop(STATE, None)
        if ledger is not None:
            ledger.close(trainer)
