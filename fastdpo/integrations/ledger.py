"""Sums that are reduced over the ranks later, and the numbers computed from them.

`deferred_metrics` fills a `Ledger`, and says when it is settled and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LIMIT = 2048
"""Number of pending sums at which they are reduced without a log, which
bounds memory and the nesting of numbers.
"""


@dataclass(eq=False)
class _Total:
    """A sum and a count. `own` is set once this rank's values are read,
    `reduced` once those of all ranks are.

    Its value includes those of `earlier`, the same sums of earlier micro-batches of the step. A
    `running` total is part of a running number, which adds up all totals by itself.
    """

    own: tuple[float, float] | None = None
    reduced: tuple[float, float] | None = None
    earlier: list[_Total] = field(default_factory=list)
    running: bool = False


Read = Callable[[_Total], tuple[float, float]]


def _value_of(total: _Total) -> tuple[float, float]:
    pairs = [x.reduced or x.own for x in (*total.earlier, total)]
    if None in pairs:
        raise RuntimeError("metrics: a sum was requested before it was read")
    sums, counts = zip(*pairs, strict=True)
    return sum(sums), sum(counts)


def _reduce(sums: Tensor) -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)


def read_into(field: str, steps: list[tuple[list[_Total], Tensor]], reduce: Callable[[Tensor], None]) -> None:
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
    """A number computed from sums that are not known yet. Only functions of TRL ever see one.

    `totals` are the sums.
    """

    def __init__(self, value: Callable[[Read], float], totals: tuple[_Total, ...] = ()):
        self.value, self.totals = value, totals

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

        return Number(value, (*self.totals, *(other.totals if isinstance(other, Number) else ())))


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
        return Number(lambda read: kind(read(total)[0]), (total,))

    def mean(self) -> Number:
        total = self._ledger.total(self._x)

        def value(read: Read) -> float:
            value, count = read(total)
            return value / count

        return Number(value, (total,))

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
    """A number to be appended to a list, and the value shown there until it is settled.

    `due` says whether the value that is shown is missing or outdated.
    """

    values: list
    number: Number
    index: int | None = None
    shown: float | None = None
    due: bool = True

    def put(self, x: float) -> None:
        self.due = False
        if self.index is None:
            self.index = len(self.values)
            self.values.append(x)
        elif self.index < len(self.values) and self.values[self.index] is self.shown:  # the list was not changed since
            self.values[self.index] = x
        self.shown = x

    def replace(self, before: _Entry) -> None:
        """Takes the place of an entry of the same list."""
        if self.index is not None and self.values[self.index : self.index + 1] == [self.shown]:
            del self.values[self.index]
        was_put = self.index is not None
        self.index, self.shown, self.due = before.index, before.shown, True
        if was_put:
            self.put(self.number.value(_value_of))


@dataclass(eq=False)
class Recording:
    """What a micro-batch has added to a ledger."""

    totals: list[_Total] = field(default_factory=list)
    entries: list[_Entry] = field(default_factory=list)


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
        self._recording: Recording | None = None

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
        if self._recording is not None:
            self._recording.totals.append(total)
        return total

    def run(self, name: str, number: Number) -> None:
        """Sets a running number, which has the value of the one before and that of further sums."""
        for total in number.totals:
            total.running = True
        self.running[name] = Number(number.value)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Yields what is added to the ledger during the block."""
        self._recording = recording = Recording()
        try:
            yield recording
        finally:
            self._recording = None

    def join(self, earlier: Recording, later: Recording) -> None:
        """Makes the metrics of two micro-batches those of one batch: sums are added up, and each
        list has one value for both.

        Args:
            earlier: a micro-batch, which may have been joined with others before it.
            later: the micro-batch after it, whose metrics were computed by the same code.
        """
        for before, total in zip(earlier.totals, later.totals, strict=True):
            if not total.running:
                total.earlier = [*before.earlier, before]
        for before, entry in zip(earlier.entries, later.entries, strict=True):
            if before.values is entry.values:
                entry.replace(before)
        replaced = set(map(id, earlier.entries))
        self._entries = [entry for entry in self._entries if id(entry) not in replaced]

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
                self._add(values, taken)
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
        for name, number in numbers.items():
            self._add(lists[name], [number])
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
        read_into("own", [step for step in self._steps if step[0][0].own is None], lambda sums: None)
        for entry in self._entries:
            if entry.due:
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
        read_into("reduced", self._steps, _reduce)
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

    def _add(self, values: list, numbers: list[Number]) -> None:
        entries = [_Entry(values, number) for number in numbers]
        self._entries += entries
        if self._recording is not None:
            self._recording.entries += entries

    def _close_step(self) -> None:
        """Stacks the sums of a step into one tensor."""
        if self._step:
            totals, sums, counts = zip(*self._step, strict=True)
            device = sums[0].device
            both = torch.stack([torch.stack([x.to(device) for x in sums]), sums[0].new_tensor(counts)])
            self._steps.append((list(totals), both))
            self._step = []
