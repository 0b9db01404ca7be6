"""Trainers whose class bypasses the functions that are patched, so that nothing would be fused.

A training in which nothing is fused is never silent. Whether a class reaches the fused call cannot be seen from its
code, so the first step tells: if it has made no call of the policy, the trainer says so before the optimizer changes a
weight, or at its first log if it has no callbacks. This neither communicates nor reads a tensor.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..logs import logger, report
from ..models.calls import calls_line
from ..reasons import Reason
from .replacements import callback, existing_instances

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerState

STATE = "_fastdpo_state"
"""The attribute of a trainer that holds the state of its trainer line.
Trainers created before `patch()` have none. For trainers that are left unpatched, it is None.
"""


def is_overridden(trainer: object, stock: type, names: Iterable[str]) -> bool:
    """Whether a trainer's class overrides any of these attributes of the stock class.

    Functions set on the trainer itself do not count, since they may exist on one rank only, like a
    profiler's.
    """
    return any(getattr(type(trainer), name) is not getattr(stock, name) for name in names)


def report_skipped_init(trainer: Any, integration: str, stock: type) -> None:
    """Reports a trainer that creates its accelerator although the patched `__init__` has not run.

    Such a trainer is not patched. Trainers created before `patch()` have an accelerator already.
    """
    if STATE not in vars(trainer) and "accelerator" not in vars(trainer):
        skipped = Reason("bypassed", override=type(trainer).__name__, stock=f"{stock.__name__}.__init__")
        leave_unpatched(trainer, integration, skipped)


def leave_unpatched(trainer: Any, integration: str, reason: Reason) -> None:
    """Marks a trainer as unpatched, and reports why."""
    vars(trainer)[STATE] = None
    report(f"{integration} ({type(trainer).__name__}): not fused, {reason.named}")


def unused_reason(trainer: Any, stock: type, functions: Iterable[str]) -> Reason:
    """That the first step of a trainer has made no call to fuse, with those of the functions of the stock class that
    its class overrides.
    """
    own = [name for name in functions if hasattr(stock, name) and is_overridden(trainer, stock, [name])]
    return Reason("no-call", trainer=type(trainer).__name__, functions=" and ".join(own) or "none of its functions")


def steps_callback(trainer: Any, integration: str, is_used: Callable[[Any], None]) -> TrainerCallback:
    """A callback that checks each step of a trainer before its weights change. At the first log of a training and at
    its end, it logs how many calls of the trainer took which path, and how many tokens were computed.

    Args:
        trainer: any trainer of transformers.
        integration: the name of its line.
        is_used: checks the first step of a trainer.
    """
    reference = weakref.ref(trainer)  # which holds the callback
    first_step, has_logged = math.inf, False

    def state_of(args: Any) -> Any:
        """The state of the trainer, or None in the callback of its copy, whose models are copies that say so."""
        trainer = reference()
        return None if trainer is None or trainer.args is not args else vars(trainer).get(STATE)

    def on_train_begin(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        nonlocal first_step
        if state_of(args) is not None:
            first_step = state.global_step + 1

    def on_pre_optimizer_step(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        patched = state_of(args)
        if patched is not None:
            if patched.budget is not None:
                patched.budget.require_batches(reference())
            is_used(reference())

    def on_log(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        nonlocal has_logged
        patched = state_of(args)
        if patched is not None and state.global_step >= first_step and not has_logged:
            has_logged = True
            _log_calls(patched, state)

    def on_train_end(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        patched = state_of(args)
        if patched is not None:
            _log_calls(patched, state)

    def _log_calls(patched: Any, state: TrainerState) -> None:
        line = calls_line(integration, patched.before)
        if line is not None and state.is_world_process_zero:
            logger.info(line)

    events = on_train_begin, on_pre_optimizer_step, on_log, on_train_end
    return callback(**{event.__name__: event for event in events})


def existing_trainers(*kinds: type, patched: bool) -> list[Any]:
    """The trainers of some classes that exist and are patched, or are not."""
    if not kinds or not existing_instances(*kinds):
        return []
    gc.collect()  # trainers are parts of reference cycles, so finished ones may still be there
    # The line of a subclass may have patched a trainer already.
    return [x for x in existing_instances(*kinds) if (vars(x).get(STATE) is not None) == patched]
