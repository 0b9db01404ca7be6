"""Callbacks of transformers' Trainer. transformers is imported when the first one is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainerCallback


def callback(**events: Callable[..., None]) -> TrainerCallback:
    """A callback with these functions of a trainer's arguments, state and control, by the names of their events."""
    from transformers import TrainerCallback

    return type("FastDPOCallback", (TrainerCallback,), {name: staticmethod(x) for name, x in events.items()})()
