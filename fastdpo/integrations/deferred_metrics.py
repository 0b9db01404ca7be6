"""Metrics of TRL's trainers without a gather or a synchronisation a step: one collective a log.

While a stock function computes its metrics, `Accelerator.gather` and `gather_for_metrics` return stand-ins for the
gathered tensors to that function, and to nothing that it calls. A sum or a mean of a stand-in is a `Number`, known
later. When the function returns, its numbers leave the trainer's lists and wait in a `Ledger`:

- `Ledger.settle` reduces them over the ranks and puts floats into the lists. It is called where stock code, too, has a
  collective on every rank right before it logs.
- `Ledger.show` puts this rank's own values there. It is called when anything but the stock function reads the lists,
  on whichever rank that happens, and never communicates. The next `settle` replaces them.

User code therefore sees lists of floats, as in stock. They hold values over all ranks in every log of the trainer, and
after each step in a subclass that overrides a function which computes metrics (`is_overridden`). Otherwise, between two
logs, they hold this rank's values.

Where a trainer calls `gather_for_metrics` on one value a rank, accelerate takes ranks for rows and leaves the last ones
out of the last batch when the rows don't divide evenly; here all ranks count.
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
"""Pending sums after which they are reduced without a log, to bound memory and the depth of numbers made of numbers."""

GATHERS = ("gather", "gather_for_metrics")


@dataclass(eq=False)
class _Total:
    """A sum and a count. `own` is set once this rank's values are read, `reduced` once those of all ranks are."""

    own: tuple[float, float] | None = None
    reduced: tuple[float, float] | None = None


Read = Callable[[_Total], tuple[float, float]]


def _known(total: _Total) -> tuple[float, float]:
    found = total.reduced or total.own
    if found is None:
        raise RuntimeError("metrics: a sum was asked for before it was read")
    return found


def _reduce(sums: Tensor) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)


def _read_into(field: str, steps: list[tuple[list[_Total], Tensor]], reduce: Callable[[Tensor], None]) -> None:
    """Reads the sums of steps, after `reduce`, into a field of their totals. One synchronisation if there are any."""
    if steps:
        device = steps[-1][1].device
        sums = torch.cat([x.to(device) for _, x in steps], 1)  # [2, K]
        reduce(sums)
        for total, pair in zip((total for totals, _ in steps for total in totals), sums.t().tolist(), strict=True):
            setattr(total, field, tuple(pair))


class Number:
    """A number made of sums that are not known yet. Only stock functions ever see one."""

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
        """Asked by trainers before they divide by it. The answer can wait: a quotient by 0 is 0, as it is there."""
        return True

    def _with(self, other: Any, operation: Callable[[float, float], float]) -> Number:
        def value(read: Read) -> float:
            return operation(self.value(read), other.value(read) if isinstance(other, Number) else other)

        return Number(value)


def _constant(x: float) -> Number:
    return Number(lambda read: x)


class Gathered:
    """Placeholder for a tensor gathered from all ranks. Supports only sums and means."""

    def __init__(self, ledger: Ledger, x: Tensor):
        self._ledger, self._x = ledger, x

    def sum(self) -> Number:
        total, kind = self._ledger.total(self._x), float if self._x.is_floating_point() else int
        return Number(lambda read: kind(read(total)[0]))

    def mean(self) -> Number:
        total = self._ledger.total(self._x)

        def value(read: Read) -> float:
            found, count = read(total)
            return found / count

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
    """A number that belongs at the end of a list, and the value shown there until it is settled."""

    values: list
    number: Number
    index: int | None = None
    shown: float | None = None

    def put(self, x: float) -> None:
        if self.index is None:
            self.index = len(self.values)
            self.values.append(x)
        elif self.index < len(self.values) and self.values[self.index] is self.shown:  # else somebody changed the list
            self.values[self.index] = x
        self.shown = x


class Ledger:
    """The sums of one trainer that have not been reduced over the ranks yet, and the numbers made of them."""

    def __init__(self) -> None:
        self._step: list[tuple[_Total, Tensor, int]] = []
        self._steps: list[tuple[list[_Total], Tensor]] = []  # sums and counts, [2, K] each
        self._entries: list[_Entry] = []
        self.running: dict[str, Number] = {}
        self._watched = False

    def __deepcopy__(self, memo: dict) -> Ledger:
        """For a trainer that is copied: its lists are copied with this rank's values in them."""
        other = memo[id(self)] = Ledger()
        other.running = {name: _constant(self.shown(name)) for name in self.running}
        return other

    def total(self, x: Tensor) -> _Total:
        total = _Total()
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        self._step.append((total, x.detach().sum(dtype=dtype), x.numel()))
        return total

    def take(self, metrics: dict[str, Any]) -> None:
        """Takes the numbers out of lists, where they are put again once they are known.

        Out of containers of another kind they can't be taken: there they are settled at once.
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
                    values[i] = x.value(_known)

    def keep(self, metrics: dict[str, Any], lists: dict[str, list]) -> dict[str, Any]:
        """Has numbers appended to the lists of their names as soon as they are known. Returns the other metrics."""
        numbers = {name: x for name, x in metrics.items() if isinstance(x, Number)}
        self._entries += [_Entry(lists[name], number) for name, number in numbers.items()]
        return {name: x for name, x in metrics.items() if name not in numbers}

    def known(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics with values over all ranks in place of numbers. Settles: every rank must call this."""
        self.settle()
        return {name: x.value(_known) if isinstance(x, Number) else x for name, x in metrics.items()}

    def look(self) -> None:
        """Shows now, and from now on after each step: the reader may keep the list."""
        self._watched = True
        self.show()

    def show(self) -> None:
        """Puts this rank's own values where numbers belong. No communication; one synchronisation if any is new."""
        self._close_step()
        _read_into("own", [step for step in self._steps if step[0][0].own is None], lambda sums: None)
        for entry in self._entries:
            if entry.shown is None:
                entry.put(entry.number.value(_known))

    def shown(self, name: str) -> float:
        """This rank's own value of a running number."""
        self.show()
        return self.running[name].value(_known)

    def settle_if_due(self, seen: bool) -> None:
        """Settles if user code is about to see numbers that stock has gathered just now, or if very many wait.

        Called on every rank, where stock has gathered.
        """
        if seen or len(self._step) + sum(len(totals) for totals, _ in self._steps) >= LIMIT:
            self.settle()
        elif self._watched:
            self.show()

    def settle(self) -> None:
        """Puts values over all ranks where numbers belong. One collective if there are ranks, one synchronisation.

        Every rank must call this. Nothing is done if nothing is pending.
        """
        self._close_step()
        _read_into("reduced", self._steps, _reduce)
        for entry in self._entries:
            entry.put(entry.number.value(_known))
        for name, number in self.running.items():  # what is known needs no history
            self.running[name] = _constant(number.value(_known))
        self._steps, self._entries = [], []

    def close(self, trainer: object) -> None:
        """Leaves plain numbers in a trainer that is no longer patched. No communication."""
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
    """The code of a package's function and of what is nested in it, by which its frames are known.

    Empty for a function of somebody else's, who has put it in the place of the package's: nothing is deferred then.
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
    """While the block lasts, what functions of this code gather goes to the ledger, unless user code gathers itself."""

    def stand_in(gather: Callable) -> Callable:
        def gather_or_defer(tensor, *args, **kwargs):
            if sys._getframe(1).f_code in codes:
                return Gathered(ledger, tensor)
            return gather(tensor, *args, **kwargs)

        return gather_or_defer

    own = vars(accelerator)
    stand_ins = {}
    if all(_is_accelerates(getattr(accelerator, name)) for name in GATHERS):
        stand_ins = {name: stand_in(getattr(accelerator, name)) for name in GATHERS}
    own.update(stand_ins)
    try:
        yield
    finally:
        for name, function in stand_ins.items():
            if own.get(name) is function:
                del own[name]


def _is_accelerates(gather: Callable) -> bool:
    function = unwrap(getattr(gather, "__func__", gather))
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("accelerate.")


def shown_to_others(name: str, ledger_of: Callable[[Any], Ledger | None], codes: frozenset[CodeType]) -> property:
    """An attribute of trainers that holds lists of metrics. Whoever reads it sees floats, but for functions of `codes`.

    `ledger_of` returns None for a trainer whose metrics are not deferred.
    """

    def get(self: Any) -> Any:
        ledger, reader = ledger_of(self), sys._getframe(1)
        if ledger is not None and reader.f_code not in codes:
            if reader.f_globals.get("__name__", "").startswith("trl."):
                ledger.show()
            else:
                ledger.look()
        return _stored(self, name)

    return property(get, lambda self, value: vars(self).__setitem__(name, value))


def running_total(name: str, ledger_of: Callable[[Any], Ledger | None], codes: frozenset[CodeType]) -> property:
    """An attribute of trainers that functions of `codes` add numbers to. Whoever else reads it sees a plain number."""

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
        if ledger is not None and name in ledger.running:  # what other ranks have added is not lost
            ledger.running[name] += value - ledger.shown(name)
            return
        vars(self)[name] = value

    return property(get, put)


def stored(trainer: Any, name: str) -> Any:
    """The attribute as it is stored, without counting as a reader. A subclass may store it elsewhere."""
    return vars(trainer)[name] if name in vars(trainer) else getattr(trainer, name)


def _stored(trainer: Any, name: str) -> Any:
    try:
        return vars(trainer)[name]
    except KeyError:
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}") from None


def settle_where_stock_communicates(
    replacements: Replacements, trainer: type, ledger_of: Callable[[Any], Ledger | None]
) -> None:
    """Has a trainer's ledger settled before `store_flos`, which comes right before each log, and after evaluations."""

    def settling(name: str, before: bool) -> Callable:
        stock = getattr(trainer, name)

        @wraps(stock)
        def function(self, *args, **kwargs):
            ledger = ledger_of(self)
            if before and ledger is not None:
                ledger.settle()
            found = stock(self, *args, **kwargs)
            if not before and ledger is not None:
                ledger.settle()
            return found

        return function

    replacements.put(trainer, "store_flos", settling("store_flos", before=True))
    for name in ("evaluation_loop", "prediction_loop"):
        if hasattr(trainer, name):
            replacements.put(trainer, name, settling(name, before=False))


def is_overridden(trainer: object, stock: type, names: Iterable[str]) -> bool:
    """Whether a trainer's class has functions of its own in place of stock's.

    A function on the trainer itself may be there on one rank alone, as a profiler's is: it does not count.
    """
    return any(getattr(type(trainer), name) is not getattr(stock, name) for name in names)
