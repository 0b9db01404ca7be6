"""Metrics of TRL's trainers with one collective per log, and no gather or synchronisation per step.

While a function of TRL computes its metrics, `Accelerator.gather` and `gather_for_metrics` return
placeholders of the gathered tensors to that function, but not to functions that it calls. A sum or
a mean of a placeholder is a `Number`, whose value is not known yet. When the function returns, its
numbers move from the trainer's lists to a `Ledger`:

- `Ledger.settle` reduces them over the ranks and puts floats into the lists. It is called where
  TRL, too, has a collective on every rank right before it logs.
- `Ledger.show` puts this rank's own values into the lists. It is called when other code reads the
  lists, on whichever rank that happens, and never communicates. The next `settle` replaces these
  values.

User code therefore sees lists of floats, as in TRL. They hold values over all ranks in every log of
the trainer, and after each step of a subclass that overrides a function which computes metrics
(`is_overridden`). Otherwise, between two logs, they hold this rank's values.

Where a trainer calls `gather_for_metrics` on one value per rank, accelerate mistakes ranks for rows
and omits the last ones from a last batch whose rows do not divide evenly. Here all ranks count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import unwrap
from types import CodeType
from typing import TYPE_CHECKING, Any

from . import evidence
from .ledger import Gathered, Ledger, Number
from .replacements import Replacements

if TYPE_CHECKING:
    from accelerate import Accelerator

GATHERS = ("gather", "gather_for_metrics")


def codes_of(function: Callable, package: str = "trl") -> frozenset[CodeType]:
    """The code objects of a package's function and of functions nested in it, which identify its
    frames.

    Empty if the function was replaced by one from elsewhere, or has changed in a version newer than the
    tested ones. Nothing is deferred then.
    """
    function = unwrap(function)
    if not f"{function.__globals__['__name__']}.".startswith(f"{package}.") or not evidence.is_tested(function):
        return frozenset()

    def nested(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from nested(constant)

    return frozenset(nested(function.__code__))


@contextmanager
def deferring(accelerator: Accelerator, ledger: Ledger, codes: frozenset[CodeType]) -> Iterator[None]:
    """During the block, tensors gathered by functions with these codes go to the ledger.

    Does nothing if user code has replaced the accelerator's gathering functions.
    """

    def deferred(gather: Callable) -> Callable:
        def gather_or_defer(tensor, *args, **kwargs):
            if sys._getframe(1).f_code in codes:
                return Gathered(ledger, tensor)
            return gather(tensor, *args, **kwargs)

        return gather_or_defer

    attributes = vars(accelerator)
    replaced = {}
    if all(_is_from_accelerate(getattr(accelerator, name)) for name in GATHERS):
        replaced = {name: deferred(getattr(accelerator, name)) for name in GATHERS}
    attributes.update(replaced)
    try:
        yield
    finally:
        for name, function in replaced.items():
            if attributes.get(name) is function:
                del attributes[name]


def _is_from_accelerate(gather: Callable) -> bool:
    function = unwrap(getattr(gather, "__func__", gather))
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("accelerate.")


def shown_metrics(name: str, ledger_of: Callable[[Any], Ledger | None], codes: frozenset[CodeType]) -> property:
    """A property for lists of metrics, which hold floats for all readers except functions with
    these codes.

    `ledger_of` returns None for trainers whose metrics are not deferred.
    """

    def get(self: Any) -> Any:
        ledger, reader = ledger_of(self), sys._getframe(1)
        if ledger is not None and reader.f_code not in codes:
            if reader.f_globals.get("__name__", "").startswith("trl."):
                ledger.show()
            else:
                ledger.watch()
        return _stored(self, name)

    return property(get, lambda self, value: vars(self).__setitem__(name, value))


def running_total(name: str, ledger_of: Callable[[Any], Ledger | None], codes: frozenset[CodeType]) -> property:
    """A property to which functions with these codes add numbers. Other readers get a plain number."""

    def get(self: Any) -> Any:
        ledger = ledger_of(self)
        if ledger is None or name not in ledger.running:
            return _stored(self, name)
        return ledger.running[name] if sys._getframe(1).f_code in codes else ledger.shown(name)

    def put(self: Any, value: Any) -> None:
        ledger = ledger_of(self)
        if ledger is not None and isinstance(value, Number):
            ledger.run(name, value)
            return
        if ledger is not None and name in ledger.running:  # keeps what other ranks have added
            ledger.running[name] += value - ledger.shown(name)
            return
        vars(self)[name] = value

    return property(get, put)


def stored(trainer: Any, name: str) -> Any:
    """The attribute as it is stored, bypassing the properties of this
    module. A subclass may store it elsewhere.
    """
    return vars(trainer)[name] if name in vars(trainer) else getattr(trainer, name)


def _stored(trainer: Any, name: str) -> Any:
    try:
        return vars(trainer)[name]
    except KeyError:
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}") from None


def settle_where_trl_communicates(
    replacements: Replacements, trainer: type, ledger_of: Callable[[Any], Ledger | None]
) -> None:
    """Settles the ledgers of a trainer class before `store_flos`, which
    precedes each log, and after evaluations.
    """

    def settling(name: str, before: bool) -> Callable:
        stock = getattr(trainer, name)

        @wraps(stock)
        def function(self, *args, **kwargs):
            ledger = ledger_of(self)
            if before and ledger is not None:
                ledger.settle()
            result = stock(self, *args, **kwargs)
            if not before and ledger is not None:
                ledger.settle()
            return result

        return function

    replacements.put(trainer, "store_flos", settling("store_flos", before=True))
    for name in ("evaluation_loop", "prediction_loop"):
        if hasattr(trainer, name):
            replacements.put(trainer, name, settling(name, before=False))


def is_overridden(trainer: object, stock: type, names: Iterable[str]) -> bool:
    """Whether a trainer's class overrides any of these attributes of the stock class.

    Functions set on the trainer itself do not count, since they may exist on one rank only, like a
    profiler's.
    """
    return any(getattr(type(trainer), name) is not getattr(stock, name) for name in names)
