"""Metrics of TRL's trainers without a gather or a synchronisation a step: one collective a log.

While a stock function computes its metrics, `Accelerator.gather` and `gather_for_metrics` return stand-ins for the
gathered tensors to that function, and to nothing that it calls. A sum or a mean of a stand-in is a `Number`, known
later. When the function returns, its numbers leave the trainer's lists and wait in a `Ledger`:

- `Ledger.settle` reduces them over the ranks and puts floats into the lists. It is called where stock code, too, has a
  collective on every rank right before it logs.
- `Ledger.show` puts this rank's own values there. It is called when anything but the stock function reads the lists,
  on whichever rank that happens, and never communicates. The next `settle` replaces them.

So user code sees lists of floats, as in stock. It sees values over all ranks at every log, and between logs where it
overrides a function that computes metrics (`is_overridden`); elsewhere between logs it sees those of its own rank.

Where a trainer calls `gather_for_metrics` on one value a rank, accelerate takes ranks for rows and leaves the last ones
out of the last batch when the rows don't divide evenly; here all ranks count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator

LIMIT = 2048
"""So many pending sums are reduced without a log: they take memory, and numbers built on numbers are deep."""


@dataclass(eq=False)
class _Total:
    """A sum and a count: of this rank, once they were read, and over all ranks, once they were reduced."""

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


class Gathered:
    """Stands in for a tensor gathered from all ranks, of which only sums and means are wanted."""

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
    """A number that belongs at the end of a list, and what stands there in its place meanwhile."""

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

    def total(self, x: Tensor) -> _Total:
        total = _Total()
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        self._step.append((total, x.detach().sum(dtype=dtype), x.numel()))
        return total

    def take(self, metrics: dict[str, list]) -> None:
        """Takes the numbers out of lists, where they are put again once they are known."""
        for values in metrics.values():
            taken = [x for x in values if isinstance(x, Number)]
            if taken:
                values[:] = [x for x in values if not isinstance(x, Number)]
                self._entries += [_Entry(values, number) for number in taken]

    def keep(self, metrics: dict[str, Any], lists: dict[str, list]) -> dict[str, Any]:
        """Has numbers appended to the lists of their names as soon as they are known. Returns the other metrics."""
        numbers = {name: x for name, x in metrics.items() if isinstance(x, Number)}
        self._entries += [_Entry(lists[name], number) for name, number in numbers.items()]
        return {name: x for name, x in metrics.items() if name not in numbers}

    def known(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics with values over all ranks in place of numbers. Settles: every rank must call this."""
        self.settle()
        return {name: x.value(_known) if isinstance(x, Number) else x for name, x in metrics.items()}

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

    def settle(self) -> None:
        """Puts values over all ranks where numbers belong. One collective if there are ranks, one synchronisation.

        Every rank must call this. Nothing is done if nothing is pending.
        """
        self._close_step()
        _read_into("reduced", self._steps, _reduce)
        for entry in self._entries:
            entry.put(entry.number.value(_known))
        for name, number in self.running.items():  # what is known needs no history
            known = number.value(_known)
            self.running[name] = Number(lambda read, known=known: known)
        self._steps, self._entries = [], []

    def close(self, trainer: object) -> None:
        """Leaves plain numbers in a trainer that is no longer patched. No communication."""
        for name in self.running:
            vars(trainer)[name] = self.shown(name)
        self.show()

    def _close_step(self) -> None:
        """One tensor holds what a step has summed."""
        if self._step:
            totals, sums, counts = zip(*self._step, strict=True)
            device = sums[0].device
            both = torch.stack([torch.stack([x.to(device) for x in sums]), sums[0].new_tensor(counts)])
            self._steps.append((list(totals), both))
            self._step = []


def codes_of(function: Callable) -> frozenset[CodeType]:
    """The code of a function and of what is nested in it, by which its frames are known."""

    def nested(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from nested(constant)

    return frozenset(nested(unwrap(function).__code__))


@contextmanager
def deferring(accelerator: Accelerator, ledger: Ledger, codes: frozenset[CodeType]) -> Iterator[None]:
    """While the block lasts, what functions of this code gather goes to the ledger."""
    own = vars(accelerator)
    before = {name: own[name] for name in ("gather", "gather_for_metrics") if name in own}

    def stand_in(gather: Callable) -> Callable:
        def gather_or_defer(tensor, *args, **kwargs):
            if sys._getframe(1).f_code in codes:
                return Gathered(ledger, tensor)
            return gather(tensor, *args, **kwargs)

        return gather_or_defer

    for name in ("gather", "gather_for_metrics"):
        own[name] = stand_in(getattr(accelerator, name))
    try:
        yield
    finally:
        del own["gather"], own["gather_for_metrics"]
        own.update(before)


def shown_to_others(name: str, ledger_of: Callable[[Any], Ledger | None], codes: frozenset[CodeType]) -> property:
    """An attribute of trainers that holds lists of metrics. Whoever reads it sees floats, but for functions of `codes`.

    `ledger_of` returns None for a trainer whose metrics are not deferred.
    """

    def get(self: Any) -> Any:
        ledger = ledger_of(self)
        if ledger is not None and sys._getframe(1).f_code not in codes:
            ledger.show()
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
        if ledger is not None:
            ledger.running.pop(name, None)
        vars(self)[name] = value

    return property(get, put)


def _stored(trainer: Any, name: str) -> Any:
    try:
        return vars(trainer)[name]
    except KeyError:
        raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {name!r}") from None


def is_overridden(trainer: object, stock: type, names: Iterable[str]) -> bool:
    """Whether a trainer has functions of its own in place of stock's, on its class or on itself."""
    return any(name in vars(trainer) or getattr(type(trainer), name) is not getattr(stock, name) for name in names)
