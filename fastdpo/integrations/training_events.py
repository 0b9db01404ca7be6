"""What a line does while a trainer that it has patched trains, at the events of the training and in its steps.

A line is any object here, since lines import this file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from ..logs import logger
from ..models import forward
from ..models.calls import calls_line
from ..models.identity.structure import is_training
from ..models.running import pace
from ..models.state import MODELS, state_of
from ..ops import memory
from .bypass import unused_reason
from .replacements import temporarily

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerCallback

DECIDED = "fastdpo: compiled layers"
"""The part of a trainer's state that says what was decided (see `pace.Training.settled`)."""


def callback(**events: Callable[..., None]) -> TrainerCallback:
    """A callback with these functions of a trainer's arguments, state and control, by the names of their events. A copy
    of it, or a pickle, does nothing.

    transformers is imported when the first one is made.
    """
    from transformers import TrainerCallback

    functions: dict[str, Any] = {name: staticmethod(x) for name, x in events.items()}
    functions["__reduce__"] = lambda self: (TrainerCallback, ())
    return type("FastDPOCallback", (TrainerCallback,), functions)()


def watching(line: Any, trainer: Any) -> TrainerCallback:
    """A callback that has a line follow each step of a trainer, and check it before its weights change."""
    reference = weakref.ref(trainer)  # which holds the callback

    def calling(event: Callable[[Any, Any, Any, Any], None]) -> Callable[..., None]:
        def call(args: Any, progress: Any, control: Any, **kwargs: Any) -> None:
            trainer = reference()  # another one may be given its callbacks
            if trainer is not None and trainer.args is args and (state := line.state_of(trainer)) is not None:
                event(line, trainer, state, progress)

        return call

    return callback(
        on_train_begin=calling(_begin_training),
        on_step_begin=calling(_begin_step),
        on_pre_optimizer_step=calling(_end_step),
        on_log=calling(_log_once),
        on_train_end=calling(_log_calls),
    )


def _begin_training(line: Any, trainer: Any, state: Any, progress: Any) -> None:
    """Has the trainer's checkpoints hold what is decided in a training."""
    state.first_step = progress.global_step + 1
    state.training = pace.begin(progress.stateful_callbacks.setdefault(DECIDED, {}))


def _begin_step(line: Any, trainer: Any, state: Any, progress: Any) -> None:
    """Says how many steps are left, and prepares the models of a trainer that another one has prepared since, which may
    train in a callback.
    """
    state.training.done = progress.global_step + 1 - state.first_step
    state.training.left = progress.max_steps - progress.global_step
    if state.budget is not None:
        state.budget.start_step()
    if any(state_of(base) is not fused() for base, fused in state.forwards.items()):
        line.prepare(trainer)
    if not state.has_stepped:
        forward.begin_step(line.policy(trainer), line.name)


def _end_step(line: Any, trainer: Any, state: Any, progress: Any) -> None:
    if state.budget is not None:
        state.budget.require_batches()
    first_step(line, trainer)


def _log_once(line: Any, trainer: Any, state: Any, progress: Any) -> None:
    if progress.global_step >= state.first_step and not state.has_logged:
        state.has_logged = True
        _log_calls(line, trainer, state, progress, ends=False)


def _log_calls(line: Any, trainer: Any, state: Any, progress: Any, ends: bool = True) -> None:
    """Logs how many calls of a trainer took which path, how many tokens were computed, and memory at the end."""
    counted = calls_line(line.name, state.before)
    for each in (counted, *(memory.lines() if ends else ())) if counted and progress.is_world_process_zero else ():
        logger.info(each)


def first_step(line: Any, trainer: Any) -> None:
    """Says, in the first step of a training, that its policy has had no call to fuse. One that has fallen back counts,
    since it has reported its own reason. The line of a trainer without callbacks of transformers calls this at its
    first log.
    """
    state = line.state_of(trainer)
    if not state.has_stepped:
        state.has_stepped = True
        if not forward.was_trained(line.policy(trainer), line.name):
            relied_on = (*line.relies_on, *getattr(line.cutting, "relies_on", ()))
            functions = dict.fromkeys((*line.expected_parameters(), *relied_on))
            line.unused(trainer, unused_reason(trainer, line.trainer_class(), functions))


def train(line: Any, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """A training, before an engine wraps its models."""
    line.attach_copy(trainer)
    state = line.state_of(trainer)
    if state is None:
        return stock(trainer, *args, **kwargs)
    state.has_stepped = False
    line.prepare(trainer)
    resumed = state.forwards.values() if kwargs.get("resume_from_checkpoint") else ()
    for fused in filter(None, (find() for find in resumed)):
        fused.audited.clear()
    try:
        return stock(trainer, *args, **kwargs)
    finally:
        pace.end()


def _evaluate(line: Any, stock: Callable, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    line.attach_copy(trainer)
    line.prepare(trainer)
    return stock(trainer, *args, **kwargs)


def _training_step(line: Any, stock: Callable, trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """The trainer's function, or what cuts its steps. It sets the mode of each module, which usually is set already."""
    state = line.state_of(trainer)
    modules = () if state is None else model.modules()
    base = next((x for x in modules if x in MODELS and "train" not in vars(x)), None)
    if state is not None and state.budget is not None:
        stock = partial(line.budget.training_step, stock)
    with nullcontext() if base is None else temporarily(base, train=MethodType(_set_mode, base)):
        return stock(trainer, model, *args, **kwargs)


def _set_mode(model: PreTrainedModel, mode: bool = True) -> Any:
    return model if mode and is_training(model) else type(model).train(model, mode)


FUNCTIONS = {"training_step": _training_step, "_inner_training_loop": train, "evaluation_loop": _evaluate}
"""By name, the functions that take a line and the stock function, and replace that of a trainer of transformers."""
