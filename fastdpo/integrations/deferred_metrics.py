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
from dataclasses import dataclass
from functools import wraps
from inspect import unwrap
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .replacements import Replacements

if TYPE_CHECKING:
    from accelerate import Accelerator

LIMIT = 2048
"""Number of pending sums at which they are reduced without a log, which
bounds memory and the nesting of numbers.
"""

GATHERS = ("gather", "gather_for_metrics")


@dataclass(eq=False)
class _Total:
    """A sum and a count. `own` is set once this rank's values are read,
    `reduced` once those of all ranks are.
    """

    own: tuple[float, float] | None = None
    reduced: tuple[float, float] | None = None


Read = Callable[[_Total], tuple[float, float]]


def _value_of(total: _Total) -> tuple[float, float]:
    pair = total.reduced or total.own
    if pair is None:
        raise RuntimeError("metrics: a sum was requested before it was read")
    return pair


def _reduce(sums: Tensor) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)


def _read_into(field: str, steps: list[tuple[list[_Total], Tensor]], reduce: Callable[[Tensor], None]) -> None:
    """Reads the sums of steps, after `reduce`, into a field of their
    totals. At most one synchronisation.
    """
    if steps:
        device = steps[-1][1].device
        sums = torch.cat([x.to(device) for _, x in steps], 1)  # [2, K]
        reduce(sums)
        for total, pair in zip((total for totals, _ in steps for total in totals), sums.t().tolist(), strict=True):
            setattr(total, field, tuple(pair))


class Number:
    """A number computed from sums that are not known yet. Only functions of TRL ever see one."""

    def __init__(self, value: Callable[[Read], float]):
        self.value = value

    def item(self) -> Number:
        return self

    def __add__(self, other: Any) -> Number:
        return self._with(other, lambda a, b: a + b)

    __radd__ = __add__

    def __truediv__(self, other: Any) -> Number:
        return self._with(other, lambda a, b: a / b if b else 0.0)

    def __floordiv__(self, other: Any) -> Number:
        return self._with(other, lambda a, b: a // b)

    def __gt__(self, bound: float) -> bool:
        """True. Trainers compare before they divide, and use 0 otherwise,
        which here is the quotient by 0.
        """
        return True

    def _with(self, other: Any, operation: Callable[[float, float], float]) -> Number:
        def value(read: Read) -> float:
            return operation(self.value(read), other.value(read) if isinstance(other, Number) else other)

        return Number(value)


def _constant(x: float) -> Number:
    return Number(lambda read: x)


class Gathered:
    """Placeholder of a tensor gathered from all ranks. Supports sums and
    means, and what TRL does before them.
    """

    def __init__(self, ledger: Ledger, x: Tensor):
        self._ledger, self._x = ledger, x

    def sum(self) -> Number:
        total, kind = self._ledger.total(self._x), float if self._x.is_floating_point() else int
        return Number(lambda read: kind(read(total)[0]))

    def mean(self) -> Number:
        total = self._ledger.total(self._x)

        def value(read: Read) -> float:
            value, count = read(total)
            return value / count

        return Number(value)

    def detach(self) -> Gathered:
        return self

    def float(self) -> Gathered:
        return Gathered(self._ledger, self._x.float())

    def __sub__(self, other: Gathered) -> Gathered:
        return Gathered(self._ledger, self._x - other._x)

    def __gt__(self, bound: float) -> Gathered:
        return Gathered(self._ledger, self._x > bound)


@dataclass(eq=False)
class _Entry:
    """A number to be appended to a list, and the value shown there until it is settled."""

    values: list
    number: Number
    index: int | None = None
    shown: float | None = None

    def put(self, x: float) -> None:
        if self.index is None:
            self.index = len(self.values)
            self.values.append(x)
        elif self.index < len(self.values) and self.values[self.index] is self.shown:  # the list was not changed since
            self.values[self.index] = x
        self.shown = x


class Ledger:
    """The sums of one trainer that have not been reduced over the ranks yet,
    and the numbers computed from them.
    """

    def __init__(self) -> None:
        self._step: list[tuple[_Total, Tensor, int]] = []
        self._steps: list[tuple[list[_Total], Tensor]] = []  # sums and counts, [2, K] each
        self._entries: list[_Entry] = []
        self.running: dict[str, Number] = {}
        self._watched = False

    def __deepcopy__(self, memo: dict) -> Ledger:
        """For copies of a trainer, whose lists then hold this rank's values."""
        other = memo[id(self)] = Ledger()
        other.running = {name: _constant(self.shown(name)) for name in self.running}
        return other

    def total(self, x: Tensor) -> _Total:
        """Adds the sum and the number of elements of a tensor to the current step."""
        total = _Total()
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        self._step.append((total, x.detach().sum(dtype=dtype), x.numel()))
        return total

    def take(self, metrics: dict[str, Any]) -> None:
        """Moves numbers from lists to the ledger, which appends their values later.

        In containers other than lists, numbers are settled at once.
        """
        for values in metrics.values():
            taken = [x for x in values if isinstance(x, Number)]
            if not taken:
                continue
            if type(values) is list:
                values[:] = [x for x in values if not isinstance(x, Number)]
                self._entries += [_Entry(values, number) for number in taken]
                continue
            self.settle()
            for i, x in enumerate(values):
                if isinstance(x, Number):
                    values[i] = x.value(_value_of)

    def keep(self, metrics: dict[str, Any], lists: dict[str, list]) -> dict[str, Any]:
        """Keeps numbers, whose values are appended to the lists of their names
        later. Returns the other metrics.
        """
        numbers = {name: x for name, x in metrics.items() if isinstance(x, Number)}
        self._entries += [_Entry(lists[name], number) for name, number in numbers.items()]
        return {name: x for name, x in metrics.items() if name not in numbers}

    def settled(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Settles the ledger, and returns metrics with values over all
        ranks. Every rank must call this.
        """
        self.settle()
        return {name: x.value(_value_of) if isinstance(x, Number) else x for name, x in metrics.items()}

    def watch(self) -> None:
        """Shows values now and after each later step, for readers that may keep the list."""
        self._watched = True
        self.show()

    def show(self) -> None:
        """Puts this rank's own values into the lists. No communication,
        and at most one synchronisation.
        """
        self._close_step()
        _read_into("own", [step for step in self._steps if step[0][0].own is None], lambda sums: None)
        for entry in self._entries:
            if entry.shown is None:
                entry.put(entry.number.value(_value_of))

    def shown(self, name: str) -> float:
        """This rank's own value of a running number."""
        self.show()
        return self.running[name].value(_value_of)

    def settle_if_due(self, read: bool) -> None:
        """Settles if user code is about to read numbers that TRL has gathered just now, or if
        `LIMIT` sums wait.

        Called on every rank, where TRL has gathered.
        """
        if read or len(self._step) + sum(len(totals) for totals, _ in self._steps) >= LIMIT:
            self.settle()
        elif self._watched:
            self.show()

    def settle(self) -> None:
        """Puts values over all ranks into the lists. At most one collective and one
        synchronisation.

        Every rank must call this. Does nothing if no sum is pending.
        """
        self._close_step()
        _read_into("reduced", self._steps, _reduce)
        for entry in self._entries:
            entry.put(entry.number.value(_value_of))
        for name, number in self.running.items():  # drops its history
            self.running[name] = _constant(number.value(_value_of))
        self._steps, self._entries = [], []

    def close(self, trainer: object) -> None:
        """Leaves plain numbers in a trainer that is no longer patched. Does not communicate."""
        for name in self.running:
            vars(trainer)[name] = self.shown(name)
        self.show()

    def _close_step(self) -> None:
        """Stacks the sums of a step into one tensor."""
        if self._step:
            totals, sums, counts = zip(*self._step, strict=True)
            device = sums[0].device
            both = torch.stack([torch.stack([x.to(device) for x in sums]), sums[0].new_tensor(counts)])
            self._steps.append((list(totals), both))
            self._step = []


def codes_of(function: Callable, package: str = "trl") -> frozenset[CodeType]:
    """The code objects of a package's function and of functions nested in it, which identify its
    frames.

    Empty if the function was replaced by one from elsewhere. Nothing is deferred then.
    """
    function = unwrap(function)
    if not f"{function.__globals__['__name__']}.".startswith(f"{package}."):
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
            ledger.running[name] = value
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
