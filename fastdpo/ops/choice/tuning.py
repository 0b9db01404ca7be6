"""The choice between several ways to compute an op on a GPU, by timing them at its first call.

At the first call of its kind in a process, each candidate must pass its check on a small case
(`verdicts`), and those that do are timed on tensors of the sizes of that call. The fastest is
used from then on, if it is faster than the built-in choice by more than the noise. It is noted for
later processes (`notes`), and logged at level INFO.

A candidate that cannot be run is never chosen, and one that raises an error after it was chosen can be
withdrawn, once, in favour of the next one. Otherwise the choice of a process never changes, so forward
and backward make the same one. What is first asked for while a compiler traces, or while a CUDA graph
is captured, keeps its built-in choice, unless there is a note on it.

**Several ranks** make the same choice, without a collective, which would hang where some ranks do not
reach a call. Each rank that needs a choice measures, and offers its own to the key-value store of the process
group. All of them take the first one there. No rank waits for another.

The built-in choices are used on CPUs, with FASTDPO_TUNE=0, and where
`torch.use_deterministic_algorithms` asks for reproducible results: other kernels round differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from textwrap import shorten
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode

from ...distributed import store_of_ranks
from ...logs import is_set, logger
from ..devices import constant_while_tracing, in_new_thread, is_capturing
from . import notes
from .verdicts import Kernel

VARIABLE = "FASTDPO_TUNE"
TUNED_DEVICES = ("cuda",)
ROUNDS = 5
MIN_SPEEDUP = 1.02  # over the built-in choice


class Candidate(NamedTuple):
    """One way to compute a call.

    Attributes:
        name: under which it is noted and logged.
        run: computes the call once. Raises an error if it cannot.
        failure: why the candidate may not be used, or None.
    """

    name: str
    run: Callable[[], object]
    failure: Callable[[], str | None]


class Choice(NamedTuple):
    """The result of timing candidates.

    Attributes:
        name: of the chosen candidate.
        measured: by candidate the milliseconds, or why it has none.
    """

    name: str
    measured: dict[str, float | str]

    @property
    def timed(self) -> list[str]:
        """The candidates that could be run, fastest first."""
        times = {name: x for name, x in self.measured.items() if not isinstance(x, str)}
        return sorted(times, key=times.__getitem__)

    def __str__(self) -> str:
        return f"{self.name} ({'; '.join(f'{name}: {_described(x)}' for name, x in self.measured.items())})"


choices: dict[Kernel, Choice] = {}
"""Those of this process so far."""

_lock = RLock()


@constant_while_tracing
def is_on(device: torch.device) -> bool:
    """Whether calls on a device are tuned."""
    if device.type not in TUNED_DEVICES or (device.type == "cuda" and not torch.cuda.is_available()):
        return False
    return is_set(VARIABLE, default="1") and not torch.are_deterministic_algorithms_enabled()


def choose(call: Kernel, builtin: str, candidates: Callable[[], Sequence[Candidate]]) -> str:
    """The name of the candidate to be used for a kind of call. Times the candidates if it is not known.

    Args:
        call: the kind of call: the op, the device, the dtype, and the sizes and options by which
            choices differ.
        builtin: the name of the candidate that is used without tuning.
        candidates: makes the candidates. Those that do not fit the device are not among them.
    """
    choice = choices.get(call)
    if choice is None:
        with _lock:
            if call not in choices:
                choices[call] = decided(call, builtin, candidates())
            choice = choices[call]
    return choice.name


def timed(call: Kernel) -> list[str]:
    """The candidates for a kind of call that could be run in this process or an earlier one, fastest first."""
    choice = choices.get(call)
    return [] if choice is None else choice.timed


def withdraw(call: Kernel, name: str, reason: str) -> None:
    """Replaces a choice by the fastest other candidate, here and for later processes.

    Without another one, later processes measure again.
    """
    with _lock:
        choice = choices.get(call)
        if choice is None or not isinstance(choice.measured.get(name), float):
            return
        measured = choice.measured | {name: shorten(reason, 200)}
        choice = Choice(choice.name, measured)
        if name == choice.name and choice.timed:
            choice = Choice(choice.timed[0], measured)
        choices[call] = choice
        notes.note(call.device, choices={call.noted: choice._asdict()})


def noted(device: torch.device) -> dict[str, Choice]:
    """The choices that are noted for later processes."""
    found = {call: _choice_of(note) for call, note in notes.read(device).choices.items()}
    return {call: choice for call, choice in found.items() if choice is not None}


def settled(call: Kernel, builtin: str, names: Sequence[str]) -> str:
    """As `choose`, where nothing can be run: the choice that is known, and otherwise from now on the built-in one."""
    with _lock:
        if call not in choices:
            choices[call] = _kept(call, names) or Choice(builtin, {})
        return choices[call].name


def bucket(size: int) -> int:
    """The least power of two that is not below a size."""
    return 1 << max(0, size - 1).bit_length()


def decided(call: Kernel, builtin: str, candidates: Sequence[Candidate]) -> Choice:
    """The choice for a kind of call, which is noted if it is measured here. The arguments are those of `choose`."""
    names = [candidate.name for candidate in candidates]
    if len(names) == 1:
        return Choice(builtin, {})
    if detect_fake_mode() is not None or is_capturing(call.device):
        return _kept(call, names) or Choice(builtin, {})

    def decide() -> Choice:
        # A mode of the call, such as that of selective checkpointing, must not see what is run to be timed.
        measured = partial(_measured, builtin, candidates, call.device)
        return _kept(call, names) or in_new_thread(measured, call.device)

    choice = _of_first_rank(call, decide)
    if choice.name not in names:
        return Choice(builtin, {})
    if choice != _kept(call, names):
        logger.info("fastdpo: %s: %s", call.noted, choice)
        if choice.timed:
            notes.note(call.device, choices={call.noted: choice._asdict()})
    return choice


def _kept(call: Kernel, names: Sequence[str]) -> Choice | None:
    """The noted choice, if it was made between the same candidates."""
    choice = _choice_of(notes.read(call.device).choices.get(call.noted))
    return choice if choice is not None and choice.measured.keys() == {*names} else None


def _choice_of(note: Any) -> Choice | None:
    """A choice that was noted. None if it is something else, or of a candidate that could not be run."""
    try:
        choice = Choice(**note)
        return choice if choice.name in choice.timed else None
    except (TypeError, AttributeError):
        return None


def _measured(builtin: str, candidates: Sequence[Candidate], device: torch.device) -> Choice:
    """Checks the candidates, and times those that pass in turns.

    Where none can be run, the built-in one remains: its error is then raised by the call itself.
    """
    reasons = {x.name: reason for x in candidates if (reason := x.failure()) is not None}
    samples: dict[str, list[float]] = {x.name: [] for x in candidates}
    for _ in range(1 + ROUNDS):  # the first one compiles
        for candidate in candidates:
            name = candidate.name
            if name in reasons:
                continue
            try:
                samples[name].append(milliseconds(candidate, device))
            except Exception as error:  # it may not compile, fit the device or its memory, or launch
                reasons[name] = f"{type(error).__name__}: {error}"
    times = {name: median(x[1:]) for name, x in samples.items() if name not in reasons}
    best = min(times, key=times.__getitem__, default=builtin)
    is_better = builtin not in times or times[best] * MIN_SPEEDUP < times[builtin]
    measured = {name: shorten(reasons[name], 200) if name in reasons else times[name] for name in samples}
    return Choice(best if is_better else builtin, measured)


def milliseconds(candidate: Candidate, device: torch.device) -> float:
    """The time that one run takes on a GPU. Waits for the GPU."""
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        candidate.run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def _of_first_rank(call: Kernel, decide: Callable[[], Choice]) -> Choice:
    """The choice of the rank that was the first to make it."""
    store = store_of_ranks()
    if store is None:
        return decide()
    identity = f"{notes.digest(call.device)} {call.noted}"
    key = f"fastdpo/{hashlib.sha256(identity.encode()).hexdigest()}"
    first = store.get(key) if store.check([key]) else store.compare_set(key, "", json.dumps(decide()))
    return Choice(*json.loads(first))


def _described(measured: float | str) -> str:
    return measured if isinstance(measured, str) else f"{measured:.3f} ms"
