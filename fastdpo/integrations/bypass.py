"""What bypasses the functions that are patched: objects that existed before, and trainers whose class does so.

A training in which nothing is fused is never silent. Whether a class reaches the fused call cannot be seen from its
code, so the first step tells: if it has made no call of the policy, the trainer says so before the optimizer changes a
weight, or at its first log if it has no callbacks. This neither communicates nor reads a tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

from ..logs import report
from ..reasons import Reason

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


def existing_instances(*kinds: type) -> list[Any]:
    """Every instance of these classes and of their subclasses that exists now.

    Looks once at what refers to the classes, which takes as long for all of them as for one.
    `gc.get_objects` would return objects that other threads are still creating.
    """
    classes = [each for kind in kinds for each in (kind, *_subclasses(kind))]
    known = {id(x) for x in classes}
    return [x for x in gc.get_referrers(*classes) if id(type(x)) in known]


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
