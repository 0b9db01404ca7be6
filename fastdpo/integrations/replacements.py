"""Replaces attributes of a trainer and restores them, makes its callbacks, and finds objects that exist."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

from ..logs import logger
from ..models.calls import calls_line
from ..models.running import pace
from ..ops import memory
from .bypass import STATE

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerState

_INHERITED = object()

DECIDED = "fastdpo: compiled layers"
"""The part of a trainer's state that says what was decided (see `pace.Training.settled`)."""


class Replacements:
    """The attributes of classes, modules and objects that one trainer line has replaced.

    `str()` lists their names.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._names: list[str] = []

    def put(self, owner: object, name: str, replacement: object) -> None:
        """Sets an attribute of a class, a module or an object. An inherited attribute
        is inherited again after `undo`, and one that other code has deleted since stays deleted.
        """
        self._undo.callback(_restore, owner, name, vars(owner).get(name, _INHERITED))
        self._names.append(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
        setattr(owner, name, replacement)

    def wrap(self, owner: Any, name: str, function: Callable) -> None:
        """Replaces a function of a class or a module.

        Args:
            owner: the class or the module.
            name: of the function.
            function: called instead, with the function that it replaces as its first argument, in
                front of those of the call.
        """
        stock = getattr(owner, name)

        @functools.wraps(stock)
        def replacement(*args, **kwargs):
            return function(stock, *args, **kwargs)

        self.put(owner, name, replacement)

    def on_undo(self, function: Callable[[], object]) -> None:
        """Has a function called by `undo`, which undoes something else than an attribute."""
        self._undo.callback(function)

    def undo(self) -> None:
        """Restores all attributes, the last one first."""
        self._undo.close()
        self._names.clear()

    def __str__(self) -> str:
        return ", ".join(self._names)


def _restore(owner: object, name: str, before: object) -> None:
    if name not in vars(owner):
        return
    if before is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


@contextmanager
def temporarily(owner: object, **attributes: Any) -> Iterator[None]:
    """Sets attributes of an object during the block. Those that it inherits, such as methods, are inherited again
    after it.
    """
    before = {name: vars(owner).get(name, _INHERITED) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            _restore(owner, name, value)


def callback(**events: Callable[..., None]) -> TrainerCallback:
    """A callback with these functions of a trainer's arguments, state and control, by the names of their events. A copy
    of it, or a pickle, does nothing.

    transformers is imported when the first one is made.
    """
    from transformers import TrainerCallback

    functions: dict[str, Any] = {name: staticmethod(x) for name, x in events.items()}
    functions["__reduce__"] = lambda self: (TrainerCallback, ())
    return type("FastDPOCallback", (TrainerCallback,), functions)()


def steps_callback(trainer: Any, line: Any) -> TrainerCallback:
    """A callback that checks each step of a trainer before its weights change. By it, the trainer says how many steps
    are left, and its checkpoints what was decided. At the first log of a training and at its end, it logs how many
    calls of the trainer took which path, and how many tokens were computed.

    Args:
        trainer: any trainer of transformers.
        line: of the trainer.
    """
    reference = weakref.ref(trainer)  # which holds the callback
    training, first_step, has_logged = pace.training(), sys.maxsize, False

    def state_of(args: Any) -> Any:
        """The state of the trainer, or None in another one that was given its callbacks."""
        trainer = reference()
        return None if trainer is None or trainer.args is not args else vars(trainer).get(STATE)

    def on_train_begin(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        nonlocal training, first_step
        if state_of(args) is not None:
            first_step = state.global_step + 1
            training = pace.begin(cast(dict[str, Any], state.stateful_callbacks).setdefault(DECIDED, {}))

    def on_step_begin(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state_of(args) is not None:
            training.done, training.left = state.global_step + 1 - first_step, state.max_steps - state.global_step
            line.begin_step(reference())

    def on_pre_optimizer_step(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        patched = state_of(args)
        if patched is not None:
            if patched.budget is not None:
                patched.budget.require_batches()
            line.first_step(reference())

    def on_log(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        nonlocal has_logged
        patched = state_of(args)
        if patched is not None and state.global_step >= first_step and not has_logged:
            has_logged = True
            _log_calls(patched, state)

    def on_train_end(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        patched = state_of(args)
        if patched is not None:
            _log_calls(patched, state, *memory.lines())

    def _log_calls(patched: Any, state: TrainerState, *others: str) -> None:
        counted = calls_line(line.name, patched.before)
        for each in (counted, *others) if counted is not None and state.is_world_process_zero else ():
            logger.info(each)

    events = on_train_begin, on_step_begin, on_pre_optimizer_step, on_log, on_train_end
    return callback(**{event.__name__: event for event in events})


def existing_instances(*kinds: type) -> list[Any]:
    """Every instance of these classes and of their subclasses that exists now.

    Looks once at what refers to the classes, which takes as long for all of them as for one.
    `gc.get_objects` would return objects that other threads are still creating.
    """
    classes = [each for kind in kinds for each in (kind, *_subclasses(kind))]
    known = {id(x) for x in classes}
    found = {id(x): x for x in gc.get_referrers(*classes) if id(type(x)) in known}
    return list(found.values())


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
