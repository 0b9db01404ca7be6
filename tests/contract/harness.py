"""What the tests of the contract know of a trainer. Each description is a file in `tests/contract/trainers`."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.version import Version

from fastdpo.integrations.admission.versions import installed_version
from fastdpo.integrations.line import TrainerLine
from fastdpo.integrations.registry import entries_of
from tests.support.comparison import assert_same, assert_same_bits
from tests.support.copies import Change
from tests.support.faults import Fault

Calls = Mapping[str, int]
"""Numbers of fused calls by role."""
Options = Mapping[str, Any]

UNUSED = "no call of the policy has reached fastdpo in the first step"
"""The reason of a trainer in which nothing is fused, before the names of what its class overrides."""


class Newer(NamedTuple):
    """Copies of a trainer's package that have a newer version.

    Attributes:
        version: that of the copies.
        copies: the changes in each of them.
        reports: what `patch` reports on each.
        recorded: prefix of functions that are among those recorded for the installed version.
    """

    version: str
    copies: Mapping[str, list[Change]]
    reports: Mapping[str, str]
    recorded: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Harness:
    """A trainer: how to train with it, and what differs from case to case.

    Attributes:
        name: that of the trainer's line.
        calls: the fused calls of one step.
        train: trains in a directory with the patches that are active. Takes models and options, returns a `Run`.
        both: trains stock, then patched, in a directory, with options. Returns a `Run` of each, patched last.
        models: creates the models that `train` and `build` take.
        build: creates a trainer whose `train` can be called again; None if only its program can.
        one_step: options with which a training has one step.
        assert_same: asserts that the runs of `both` are the same up to rounding.
        assert_same_bits: asserts that they are, if nothing was fused.
        setting: what the trainer needs around each test, given a directory.
        seams: functions of modules that `patch` replaces, by "module.name".
        options: cases that are fused, as options of `both` and the number of calls.
        thorough: the options that `--quick` leaves out.
        families: options of `both` for families of models, each of which is trained for two steps.
        fallbacks: cases that fall back: options of `both`, calls by role and path, and the reason.
        bypassing: cases in which no call is fused: options of `both` and the reason.
        strict: the fallback of which `FASTDPO_STRICT=1` makes an error, as options of `train` and its message.
        sabotages: faults that the comparison of a training must notice, with options of `both`.
        far: whether each of them is far above rounding.
        verified: options of trainings with `verify=True`, with the number of verified calls.
        scores: what the verification of a reward model compares, in words.
        ranks: options of `both` on each of two ranks, and the number of calls there; None if none can train.
        newer: the newer versions of its package.
    """

    name: str
    calls: Calls
    train: Callable[..., Any]
    both: Callable[..., Sequence[Any]]
    models: Callable[[], Sequence[Any]] = tuple
    build: Callable[..., Any] | None = None
    one_step: Options = field(default_factory=lambda: {"max_steps": 1})
    assert_same: Callable[..., None] = assert_same
    assert_same_bits: Callable[..., None] = assert_same_bits
    setting: Callable[[Path], AbstractContextManager[Any]] = lambda directory: nullcontext()
    seams: tuple[str, ...] = ()
    options: Mapping[str, tuple[Options, Calls]] = field(default_factory=dict)
    thorough: frozenset[str] = frozenset({"compiled"})
    families: Mapping[str, Options] = field(default_factory=dict)
    fallbacks: Mapping[str, tuple[Options, Mapping[tuple[str, str], int], str]] = field(default_factory=dict)
    bypassing: Mapping[str, tuple[Options, str]] = field(default_factory=dict)
    strict: tuple[Options, str] | None = None
    sabotages: Mapping[str, tuple[Fault, Options]] = field(default_factory=dict)
    far: bool = True
    verified: Mapping[str, tuple[Options, int]] = field(default_factory=dict)
    scores: str | None = None
    ranks: tuple[Options, Calls] | None = None
    newer: Newer | None = None

    def line(self) -> TrainerLine:
        """The trainer's line for the installed version."""
        package = self.name.partition(".")[0]
        found = (x for x in entries_of(self.name) if x.supports(installed_version(package)))
        return next(found).load()

    def trainer_class(self) -> type:
        return self.line().trainer_class()

    def fused(self, steps: int) -> dict[str, int]:
        """The calls of some steps."""
        return {role: steps * n for role, n in self.calls.items()}


class Case(NamedTuple):
    """A case of a trainer: its name in one of the mappings of `Harness`, and its value there."""

    harness: Harness
    name: str
    value: Any


def sabotaged_by(*planted: Fault, **options: Any) -> dict[str, tuple[Fault, Options]]:
    """Entries of `Harness.sabotages`, with the same options."""
    return {fault.__name__: (fault, options) for fault in planted}


def with_dropout(calls: Mapping[tuple[str, str], int], **options: Any) -> dict:
    """The entry of `Harness.fallbacks` for attention with dropout, with options of `both`."""
    options = dict(tiny=dict(attention_dropout=0.1), **options)
    return {"attention dropout": (options, calls, "attention dropout is active [attention-dropout]")}


def bypassed(trainer_class: type, *functions: str, name: str | None = None, **options: Any) -> dict:
    """The entry of `Harness.bypassing` for a class with functions of its own, which may be logged by another name."""
    reason = f"{UNUSED}; {name or trainer_class.__name__} overrides {' and '.join(functions)}"
    return {f"own {' and '.join(functions)}": (dict(trainer_class=trainer_class, **options), reason)}


PATHS = {"openrlhf": ("openrlhf", "openrlhf/stand_ins"), "swift": (), "llamafactory": ("programs/llamafactory",)}
"""The programs that have environments of their own, with folders of modules that their trainings import."""


def in_each_layout(cases: Mapping[str, tuple[Options, Calls]], layouts: Mapping[str, Options]) -> dict:
    """Cases of `Harness.options` in each of some layouts of batches."""
    return {
        f"{name}, {layout}": ({**options, **of_layout}, calls)
        for name, (options, calls) in cases.items()
        for layout, of_layout in layouts.items()
    }


def repeated(cases: Mapping[str, tuple[Options, Calls]]) -> frozenset[str]:
    """Those of cases in two layouts without which each case, and each layout, still occurs."""
    return frozenset(name for i, name in enumerate(cases) if (i + i // 2) % 2)


def trainings_of(environment: str, files: str = "*.py") -> Iterator[Harness]:
    for path in sorted((Path(__file__).parent / "trainers" / environment).glob(files)):
        yield from importlib.import_module(f"tests.contract.trainers.{environment}.{path.stem}").HARNESSES


@functools.cache
def harnesses() -> tuple[Harness, ...]:
    """The trainers of the environment: those of the program that is installed, or those of TRL."""
    for program, folders in PATHS.items():
        if find_spec(program) is not None:
            sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in folders]
            return tuple(trainings_of(program))
    version = Version(importlib.metadata.version("trl"))
    if version < Version("0.29"):
        return tuple(trainings_of("trl_legacy"))
    return tuple(trainings_of("trl", "*.py" if version >= Version("1.15") else "dpo.py"))


def cases(attribute: str) -> pytest.MarkDecorator:
    """Parametrizes a test with `case`: each entry of a mapping of each harness."""
    params = []
    for harness in harnesses():
        for name, value in getattr(harness, attribute).items():
            marks = [pytest.mark.thorough] if attribute == "options" and name in harness.thorough else []
            params.append(pytest.param(Case(harness, name, value), id=f"{harness.name}-{name}", marks=marks))
    return pytest.mark.parametrize("case", params)


def each(having: Callable[[Harness], object] = lambda harness: True) -> pytest.MarkDecorator:
    """Parametrizes a test with `harness`: those that have something."""
    return pytest.mark.parametrize("harness", [pytest.param(x, id=x.name) for x in harnesses() if having(x)])
