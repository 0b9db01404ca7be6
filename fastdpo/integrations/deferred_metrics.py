"""What a trainer gathers and reads every step, kept on the device until a log is due: one collective a log.

While the trainer computes its metrics, its accelerator's `gather` and `gather_for_metrics` answer with stand-ins for
tensors of all ranks. A sum or a mean of one, and what is made of those, is a number that is known later. `settle`,
called before the trainer averages its metrics, reduces all that is pending at once and puts plain numbers in its place.

The numbers are those of the trainer. Where it calls `gather_for_metrics` on one value a rank, accelerate takes ranks
for rows and leaves the last ones out at the end of an evaluation whose rows don't divide evenly; here all ranks count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator

LIMIT = 2048
"""So many pending sums are reduced without a log: they take memory, and numbers built on numbers are deep."""


class Ledger:
    """The sums and counts of one trainer that have not been reduced over the ranks yet."""

    def __init__(self) -> None:
        self._pending: list[tuple[_Total, Tensor, int]] = []

    def gather(self, x: Tensor, *args: Any, **kwargs: Any) -> Gathered:
        """Stands in for `Accelerator.gather` and `gather_for_metrics`."""
        return Gathered(self, x.detach())

    def total(self, x: Tensor) -> _Total:
        if len(self._pending) >= LIMIT:  # at the same step on all ranks: they do the same
            self.settle()
        dtype = torch.float32 if x.device.type == "mps" else torch.float64
        total = _Total()
        self._pending.append((total, x.sum(dtype=dtype), x.numel()))
        return total

    def settle(self) -> None:
        """One collective if there is more than one rank, one synchronisation; none if nothing is pending."""
        if not self._pending:
            return
        totals, sums, counts = zip(*self._pending, strict=True)
        self._pending = []
        device = sums[0].device
        both = torch.stack([torch.stack([x.to(device) for x in sums]), sums[0].new_tensor(counts)])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(both)
        for total, found, count in zip(totals, *both.tolist(), strict=True):
            total.sum, total.count = found, count


class _Total:
    """The sum and count over all ranks; None until they are reduced."""

    sum: float | None = None
    count: float | None = None


class Gathered:
    """A tensor as it would be gathered from all ranks, of which only sums and means are wanted."""

    def __init__(self, ledger: Ledger, x: Tensor):
        self._ledger, self._x = ledger, x

    def _number(self, value: Callable[[_Total], float]) -> Number:
        total = self._ledger.total(self._x)
        return Number(self._ledger, lambda: value(total))

    def sum(self) -> Number:
        return self._number(lambda total: _known(total.sum))

    def mean(self) -> Number:
        return self._number(lambda total: _known(total.sum) / _known(total.count))

    def detach(self) -> Gathered:
        return self

    def float(self) -> Gathered:
        return Gathered(self._ledger, self._x.float())

    def __sub__(self, other: Gathered) -> Gathered:
        return Gathered(self._ledger, self._x - other._x)

    def __gt__(self, bound: float) -> Gathered:
        return Gathered(self._ledger, self._x > bound)


class _NotYet(Exception):
    """A number was asked for before its sums were reduced."""


def _known(x: float | None) -> float:
    if x is None:
        raise _NotYet
    return x


class Number:
    """A number made of sums over all ranks. `float()` of it settles the ledger, on all ranks, if need be."""

    def __init__(self, ledger: Ledger, value: Callable[[], float]):
        self._ledger, self._value, self._found = ledger, value, None

    def _peek(self) -> float:
        if self._found is None:
            self._found = self._value()
        return self._found

    def __float__(self) -> float:
        try:
            return self._peek()
        except _NotYet:
            self._ledger.settle()
            return self._peek()

    def __int__(self) -> int:
        return int(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

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
        def value() -> float:
            return operation(self._peek(), other._peek() if isinstance(other, Number) else other)

        number = Number(self._ledger, value)
        with suppress(_NotYet):
            number._peek()  # what is known needs no history
        return number


@contextmanager
def deferring(accelerator: Accelerator, ledger: Ledger) -> Iterator[None]:
    """While the block lasts, what is gathered goes to the ledger."""
    own = vars(accelerator)
    before = {name: own[name] for name in ("gather", "gather_for_metrics") if name in own}
    own["gather"] = own["gather_for_metrics"] = ledger.gather
    try:
        yield
    finally:
        del own["gather"], own["gather_for_metrics"]
        own.update(before)


def settle(ledger: Ledger, metrics: dict[str, list]) -> None:
    """Turns the numbers in lists of metrics into floats, in place."""
    ledger.settle()
    for values in metrics.values():
        values[:] = [float(x) if isinstance(x, Number) else x for x in values]
