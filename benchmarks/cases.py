"""What is measured: suites are lists of cases, a case has named sides, a side runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

SUBJECT = "fastdpo"

Arrays = dict[str, np.ndarray]


class Unavailable(RuntimeError):
    """A side that can't run on this machine. The message is the reason."""


class Checkable(Protocol):
    """What a suite's truth returns, in its worker.

    Attributes:
        batches: how many different batches there are.
    """

    batches: int

    def check(self) -> Arrays:
        """Runs every batch once, which also warms up, and returns the numbers that all sides must agree on."""
        ...


class Stepper(Checkable, Protocol):
    """What a side's `build` returns, in its worker. Its batches are taken in turn."""

    def step(self, batch: int) -> None:
        """What is timed."""
        ...

    def rest(self) -> None:
        """What has to happen after a step, outside of the timing."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the side has to say of itself after its steps, for the JSON."""
        ...


@dataclass(frozen=True)
class Side:
    """One of the programs that are compared.

    Attributes:
        name: as it stands in tables.
        build: "module:callable"; called as `callable(workload, **options)` in the worker, it returns a `Stepper`.
        workload: what is computed. Sides with equal workloads must give equal numbers.
        options: what makes this side another one.
        compared: False for a bound, which computes something else on purpose; nothing is claimed of its numbers.
    """

    name: str
    build: str
    workload: Any
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    compared: bool = True


@dataclass(frozen=True)
class Case:
    """Sides that take turns. `group` is what geometric means are taken over, `facts` go to the JSON."""

    name: str
    group: str
    sides: tuple[Side, ...]
    facts: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Suite:
    """A list of cases.

    Attributes:
        name: on the command line, in file names and in the markers of README.md.
        title: one line for tables and plots.
        truth: "module:callable"; called as `callable(workload)` in a worker, its `check()` returns what `equality`
            judges by: arrays named "exact/...", "plain/..." and "slack/...".
        cases: given whether to be quick.
        rounds: passes over a case's batches.
        together: whether sides share a process on a GPU, as those can that change nothing outside of themselves.
        conclude: what a suite says beyond medians and ratios, from the JSON's cases.
    """

    name: str
    title: str
    truth: str
    cases: Callable[[bool], list[Case]]
    rounds: int
    together: bool = False
    conclude: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda cases: {}
