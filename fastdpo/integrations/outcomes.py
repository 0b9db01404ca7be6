"""What `fastdpo run` prints of a trainer at the end: its calls, and what came of each option that was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..models.calls import calls_line, outcomes
from . import patching
from .registry import applies


def summary(trainer: str) -> str | None:
    """The counters of a trainer and the outcomes of its options, those that were given and those that had one, or None
    if none of its models was called.
    """
    counted = calls_line(trainer)
    options = patching.options_of(trainer)
    if counted is None or options is None:
        return counted
    cut = {"max_tokens": options.max_tokens} if outcomes[trainer, "steps"] else {}
    return "; ".join([counted, *_outcomes(trainer, options.given() | cut)])


def summary_without_calls(trainers: Sequence[str], given: Mapping[str, object]) -> str:
    """What to print of options that were given, if no model of any of these patched trainers was called."""
    named = dict.fromkeys(outcome for trainer in trainers for outcome in _outcomes(trainer, given))
    return "; ".join([f"fastdpo: {', '.join(trainers)} calls: none", *named])


def _outcomes(trainer: str, given: Mapping[str, object]) -> list[str]:
    """The options that apply to a trainer, with what came of them."""
    applying = [name for name in given if applies(name, trainer)]
    return [f"{name}={given[name]}{_outcome(trainer, name)}" for name in applying]


def _outcome(trainer: str, option: str) -> str:
    if option == "verify":
        verified = outcomes[trainer, "verified"]
        return f" (first calls that agreed with stock ones: {verified})" if verified else " (no call was compared)"
    if option == "max_tokens":
        steps, parts = (outcomes[trainer, x] for x in ("steps", "micro-batches"))
        return f" ({steps} steps in {parts} micro-batches)"
    return ""
