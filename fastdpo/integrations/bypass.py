"""Trainers whose class bypasses the functions that are patched, so that nothing would be fused.

A training in which nothing is fused is never silent: if the policy has not been called by the trainer's first log,
the trainer says so (`report_if_unused`). A class that does override a function without naming the stock one
is seen earlier, when the trainer is built, and leaves it unpatched, with its models as they were (`bypass_reason`).
That check must not refuse a class whose code may reach the fused call. It may trust one that does not, since the
first log tells. Neither check communicates or reads a tensor.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from ..logs import logger, report
from ..models import forward
from ..models.calls import calls_line
from ..models.functions import closure_contents, inner_function
from ..reasons import Reason
from .replacements import callback, existing_instances

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainerState

STATE = "_fastdpo_state"
"""The attribute of a trainer that holds the state of its trainer line.
Trainers created before `patch()` have none. For trainers whose class bypasses the patched
functions, it is None.
"""


def bypass_reason(trainer: object, stock: type, path: tuple[str, ...]) -> Reason | None:
    """Returns why no call of a trainer can be fused, or None if that cannot be seen from its class.

    Args:
        trainer: an instance of the stock class or of a subclass.
        stock: the trainer class that is patched.
        path: the functions that lead to the fused call, each of which calls the next one. The last
            name may be that of an argument which makes a call of the model a fused one.

    An override is trusted if its code names the function that it replaces or one behind it in the
    path. The code of functions that it names counts, too, as far as they belong to the subclass, to
    the override's module or to its closure.
    """
    classes = type(trainer).__mro__
    subclasses = classes[: classes.index(stock)]
    for i, name in enumerate(path):
        for owner in subclasses:
            if name not in vars(owner):
                continue
            named = _reachable_names(vars(owner)[name], subclasses)
            if named is not None and named.isdisjoint(path[i:]):
                return Reason("bypassed", override=f"{owner.__name__}.{name}", stock=f"{stock.__name__}.{name}")
            if named is None or name not in named:  # it does not reach the next override
                break
    return None


def is_overridden(trainer: object, stock: type, names: Iterable[str]) -> bool:
    """Whether a trainer's class overrides any of these attributes of the stock class.

    Functions set on the trainer itself do not count, since they may exist on one rank only, like a
    profiler's.
    """
    return any(getattr(type(trainer), name) is not getattr(stock, name) for name in names)


def report_skipped_init(trainer: Any, integration: str, stock: type, path: tuple[str, ...]) -> None:
    """Reports a trainer that creates its accelerator although the patched `__init__` has not run.

    Such a trainer is not patched. Trainers created before `patch()` have an accelerator already.
    """
    if STATE not in vars(trainer) and "accelerator" not in vars(trainer):
        skipped = Reason("bypassed", override=type(trainer).__name__, stock=f"{stock.__name__}.__init__")
        leave_unpatched(trainer, integration, bypass_reason(trainer, stock, path) or skipped)


def leave_unpatched(trainer: Any, integration: str, reason: Reason) -> None:
    """Marks a trainer as unpatched, and reports why."""
    vars(trainer)[STATE] = None
    report(f"{integration} ({type(trainer).__name__}): not fused, {reason.named}")


def report_if_unused(trainer: Any, integration: str, policy: Any) -> None:
    """Reports a patched trainer whose policy has had no call to fuse by the first log.

    A call that has fallen back counts, since it has reported its own reason.
    """
    if not forward.was_called(policy, integration):
        reason = Reason("no-call")
        report(f"{integration} ({type(trainer).__name__}): not fused, {reason.named}")


def first_log_callback(trainer: Any, integration: str, policy_of: Callable[[Any], Any]) -> TrainerCallback:
    """A callback that calls `report_if_unused` at the first log of a training. There and at the end,
    it logs how many calls of the trainer took which path, and how many tokens were computed.

    `policy_of` returns the policy of a trainer.
    """
    reference = weakref.ref(trainer)  # which holds the callback
    first_step = math.inf

    def state_of(args: Any) -> Any:
        """The state of the trainer, or None in the callback of its copy, whose models are copies that say so."""
        trainer = reference()
        return None if trainer is None or trainer.args is not args else vars(trainer).get(STATE)

    def on_train_begin(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        nonlocal first_step
        if state_of(args) is not None:
            first_step = state.global_step + 1

    def on_log(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        patched, trainer = state_of(args), reference()
        if trainer is not None and patched is not None and state.global_step >= first_step and not patched.has_logged:
            patched.has_logged = True
            report_if_unused(trainer, integration, policy_of(trainer))
            _log_calls(patched, state)

    def on_train_end(args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        patched = state_of(args)
        if patched is not None:
            _log_calls(patched, state)

    def _log_calls(patched: Any, state: TrainerState) -> None:
        line = calls_line(integration, patched.before)
        if line is not None and state.is_world_process_zero:
            logger.info(line)

    return callback(on_train_begin=on_train_begin, on_log=on_log, on_train_end=on_train_end)


def existing_trainers(*kinds: type, patched: bool) -> list[Any]:
    """The trainers of some classes that exist and are patched, or are not."""
    if not kinds or not existing_instances(*kinds):
        return []
    gc.collect()  # trainers are parts of reference cycles, so finished ones may still be there
    # The line of a subclass may have patched a trainer already.
    return [x for x in existing_instances(*kinds) if (vars(x).get(STATE) is not None) == patched]


def _reachable_names(function: Any, subclasses: tuple[type, ...]) -> set[str] | None:
    """The names and strings in the code of a function, and in that of functions that it names.

    Returns None for a callable without Python code.
    """
    pending, seen, names = [inner_function(function)], set(), set()
    if not isinstance(pending[0], FunctionType):
        return None
    while pending:
        function = pending.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        own, scope = {*_names_in(function.__code__)}, function.__globals__
        in_module, in_closure = [scope[name] for name in own & scope.keys()], closure_contents(function)
        # The stock function itself may be kept under another name.
        names |= own | {x.__name__ for x in (*in_module, *in_closure) if isinstance(x, FunctionType)}
        called = [vars(owner)[name] for owner in subclasses for name in own & vars(owner).keys()]
        called += [x for x in in_module if getattr(x, "__globals__", None) is scope]
        pending += map(inner_function, (*called, *in_closure))
    return names


def _names_in(code: object) -> Iterator[str]:
    """The names and strings in a code object and in its constants: nested code objects, strings, and the names of
    keyword arguments, which are tuples.
    """
    if isinstance(code, str):
        yield code
    elif isinstance(code, (CodeType, tuple)):
        for x in (*code.co_names, *code.co_consts) if isinstance(code, CodeType) else code:
            yield from _names_in(x)
