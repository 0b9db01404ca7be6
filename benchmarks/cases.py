"""A suite is a list of cases; a case compares named sides on one workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

SUBJECT = "fastdpo"
"""The side that all other sides are compared with."""

Arrays = dict[str, np.ndarray]


class Unavailable(RuntimeError):
    """Raised by a side that cannot run on this machine. The message is the reason."""


class Checkable(Protocol):
    """Computes the ground truth of a workload. Built in a worker from `Suite.truth`.

    Attributes:
        batches: number of different batches.
    """

    batches: int

    def check(self) -> Arrays:
        """Runs every batch once and returns the numbers on which all sides must agree.

        Also serves as warm-up.
        """
        ...


class Stepper(Checkable, Protocol):
    """Runs the steps of a side.

    Built in a worker from `Side.build`; its batches are taken in turn. A side may have a clock of its own, `now()`
    in seconds, and `warms_up` if each step that is timed comes after one that is not.
    """

    def step(self, batch: int) -> None:
        """The timed part."""
        ...

    def reset(self) -> None:
        """Cleans up after a step, outside of the timed part."""
        ...

    def facts(self) -> dict[str, Any]:
        """Further facts about the steps, for the JSON."""
        ...


@dataclass(frozen=True)
class Side:
    """One of the programs that a case compares.

    Attributes:
        name: label in tables and plots.
        build: "module:callable". The worker calls `callable(workload, **options)`, which returns a
            `Stepper`.
        workload: what is computed. Sides with equal workloads must return equal numbers.
        options: what distinguishes this side from others with the same `build`.
        compared: False for a lower bound, which computes something else on purpose; its numbers are
            not checked.
    """

    name: str
    build: str
    workload: Any
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    compared: bool = True


@dataclass(frozen=True)
class Case:
    """Sides that are timed in turn.

    Attributes:
        name: label in tables and plots; unique in its suite.
        group: geometric means are taken over the cases of a group.
        sides: the programs.
        facts: further facts, for the JSON.
        batches: names of the batches and their facts. The results of each are then a case of its own, so that
            a model is built once for all of them. The facts of such a side say `tokens_of_batches`.
    """

    name: str
    group: str
    sides: tuple[Side, ...]
    facts: dict[str, Any] = field(default_factory=dict, hash=False)
    batches: Mapping[str, dict[str, Any]] = field(default_factory=dict, hash=False)

    @property
    def names(self) -> list[str]:
        """The names of the cases in the results."""
        return [f"{self.name}/{batch}" for batch in self.batches] or [self.name]


@dataclass(frozen=True)
class Suite:
    """A list of cases.

    Attributes:
        name: name on the command line and of the JSON file.
        title: title of its table and plot.
        truth: "module:callable". The worker calls `callable(workload)`, whose `check()` returns the
            arrays "exact/...", "plain/..." and "slack/..." that `benchmarks.equality` compares
            sides with.
        cases: returns the cases; its argument says whether they are to be tiny.
        rounds: number of passes over the batches of a case.
        share_process_on_gpu: whether the sides run in one process on a GPU. Only for sides that
            change no state outside of themselves.
        descriptions: one sentence for each side: what it runs.
    """

    name: str
    title: str
    truth: str
    cases: Callable[[bool], list[Case]]
    rounds: int
    share_process_on_gpu: bool = False
    descriptions: Mapping[str, str] = field(default_factory=dict, hash=False)
