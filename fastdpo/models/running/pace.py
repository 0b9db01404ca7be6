"""Whether recording a CUDA graph, or compiling the layers, pays in what is left of a training.

Arithmetic alone: a clock says how long a call and what follows it take, and the optimizers, or a trainer that knows its
last step, how many calls are left. What is not known is guessed, and each guess is replaced by what was measured.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ...logs import is_set
from ...ops import second_derivatives
from ...ops.choice.notes import Compiled
from ...ops.memory import VARIABLE

WARM_UP = 8
"""Number of calls before the first decision. The first ones compile kernels and fill caches."""

MARGIN = 1.5
"""What is spent must come back so many times."""

LEAST_SAVING = 0.05
"""The part of the time between two calls that must be saved. Less than that is noise."""

LOST_SECONDS, LOST_PART = 2.0, 0.01
"""What may be spent on what is not kept, in seconds and as a part of the training."""

BUSY = 1.15
"""A device is busy that needs so many times what the host needs to launch its work."""

SURE = 4
"""A recording that is expected to save so many times what it must needs no trial."""

WORTH_ANOTHER = 0.7
"""Of the tokens of a recording that did not pay, those from which a smaller one does not either."""

WATCHED, SLOWER = 50, 0.02
"""Number of whole steps by which replays are judged in the end, and the part by which they may be slower."""

NEAREST = 3
"""Number of steps, those with the most similar numbers of tokens, that another one is compared with."""

RECORDING_SECONDS = 1.0
"""What a recording and its comparison take, until one was made."""

COMPILING_SECONDS, TRYING_SECONDS = 45.0, 20.0
"""What compiling takes for a model for which no process has noted it, and what trying it takes at most."""

SMALL, LARGE = 0.2, 0.12
"""What compiled layers save of a model of up to 2e9 parameters, and of a larger one, until it was measured. On an H200,
they saved 17 to 47 % of the steps of one of 0.5e9, and 31 % of one of 8e9 with LoRA."""


@dataclass
class Training:
    """The optimizer steps of a training.

    Attributes:
        done: so far.
        left: as a trainer says; None if none does. Then as many are expected as were done.
        settled: by the name of a model, whether its layers are compiled. A checkpoint holds it.
        is_growing: whether later steps may have larger batches, for which recordings wait.
    """

    done: int = 0
    left: int | None = None
    settled: dict[str, bool] = field(default_factory=dict)
    is_growing: bool = False

    def further(self, seen: float) -> float:
        """How often something is expected to occur again that was seen so often."""
        return seen if self.left is None else seen * self.left / max(self.done, 1)


trainings = [Training()]
"""The training that runs, alone."""


def training() -> Training:
    """The training that runs."""
    if trainings[-1].left is None:
        _count_steps()
    return trainings[-1]


def begin(settled: dict[str, bool]) -> Training:
    """Takes note that a trainer begins, and of what its checkpoint says. It counts the steps itself."""
    _count_steps().remove()
    _count_steps.cache_clear()
    trainings[:] = [Training(left=0, settled=settled)]
    return trainings[-1]


def end() -> None:
    """Takes note that the training of a trainer has ended, if by an error. Steps of other loops are counted again."""
    trainings[-1].left, trainings[-1].is_growing = None, False
    _count_steps()


@functools.cache
def _count_steps() -> RemovableHandle:
    """Has optimizers count the steps of the training that runs."""

    def count(*_: object) -> None:
        trainings[-1].done += 1

    return register_optimizer_step_post_hook(count)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The time that a function takes on the host and on a device."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


def is_busy(run: Callable[[], object], device: torch.device) -> bool:
    """Whether a device takes longer for a function than the host, which launches what it does."""
    launched: list[float] = []

    def launch() -> None:
        start = time.perf_counter()
        run()
        launched.append(time.perf_counter() - start)

    return seconds(launch, device) > BUSY * launched[0]


class Trial(NamedTuple):
    """The seconds of two ways to compute the same batch.

    Attributes:
        tokens: of the batch.
        before: by the layers.
        after: by a replay, or by compiled layers.
    """

    tokens: int
    before: float
    after: float

    @property
    def saved(self) -> float:
        return self.before - self.after


class Step(NamedTuple):
    """The tokens of a whole step of the optimizer, and the seconds until the next one begins."""

    tokens: int
    seconds: float


def saving_of(before: list[Step], after: list[Step]) -> float | None:
    """The part of whole steps that later ones save in the median, each next to those before that have nearly as many
    tokens. None until there are enough of them.
    """
    if len(before) < NEAREST or len(after) < WARM_UP:
        return None

    def seconds_before(tokens: int) -> float:
        return median(x.seconds for x in sorted(before, key=lambda x: abs(x.tokens - tokens))[:NEAREST])

    return 1 - median(x.seconds / seconds_before(x.tokens) for x in after)


class Pace:
    """The calls of a model of one kind, with or without gradients.

    Args:
        training: that it is a part of.
        now: a clock in seconds.
        has_backward: whether they have gradients.
        is_alone: whether there is one rank. A trial then sees all that a replay changes. It does not see that ranks
            wait longer for gradients that come all at once.

    Attributes:
        calls: their number.
        trials: of recordings.
        is_busy: whether the device is, while the layers run; None before it is known.
        lost: seconds for recordings, and for compiled layers that were not kept.
        saved_by_change: the part of whole steps that the last change saves; None before it is known.
    """

    def __init__(
        self,
        training: Training,
        now: Callable[[], float] = time.perf_counter,
        *,
        has_backward: bool = True,
        is_alone: bool = True,
    ) -> None:
        self.training, self._now, self._has_backward = training, now, has_backward
        self._is_alone = is_alone or not has_backward
        self.calls, self._since = 0, 0  # all of them, and those since something has changed
        self._between: deque[float] = deque(maxlen=2 * WARM_UP)
        self._recording_seconds: float | None = None
        self._step, self._tokens, self._is_replayed = -1, 0, False  # of the step that runs
        self._steps: dict[bool, list[Step]] = {False: [], True: []}  # by whether something was replayed
        self.change()

    def call(self) -> None:
        """Takes note of a call that begins, and of the step before, if it is the first one of another step."""
        now, last = self._now(), self._last
        if last is not None:
            self._between.append(now - last)
        self._last, self.calls, self._since = now, self.calls + 1, self._since + 1
        if self._step != self.training.done:
            if self._began is not None and self._tokens:
                self._end_step(Step(self._tokens, now - self._began))
            self._step, self._began, self._tokens, self._is_replayed = self.training.done, now, 0, False

    def take(self, tokens: int, *, is_replayed: bool) -> None:
        """Takes note of the batch of a call."""
        self._tokens, self._is_replayed = self._tokens + tokens, self._is_replayed or is_replayed

    def _end_step(self, step: Step) -> None:
        """Judges replays, and in the end the last change, by the first steps."""
        steps, replays = self._steps[self._is_replayed], self._steps[True]
        if len(steps) == WATCHED:
            return
        steps.append(step)
        self._saved_by_replays = saving_of(self._steps[False], replays)
        if steps is replays and len(steps) == WARM_UP:
            self._since = 0  # recordings that were too many before are made now
        if len(steps) == WATCHED and (steps is replays or not replays):
            self.saved_by_change = saving_of(self._before[self._is_replayed], steps)

    def interrupt(self) -> None:
        """Leaves out the time to the next call and step, in which something else was done."""
        self._last = self._began = None
        self._since = 0

    def change(self) -> None:
        """Forgets what was measured, but for the steps, since the layers take another time from now on."""
        self._before, self._steps = self._steps, {False: [], True: []}
        self._saved_by_replays = self.saved_by_change = None
        self.trials, self.lost = list[Trial](), 0.0
        self.is_busy: bool | None = None
        self._between.clear()
        self.interrupt()

    @property
    def between(self) -> float:
        """The seconds from a call to the next one, in the median. Infinite before they are known."""
        return median(self._between) if len(self._between) >= WARM_UP - 1 else torch.inf

    def is_recorded(self, tokens: int, seen: int) -> bool:
        """Whether a recording of a number of tokens that was seen so often is expected to pay. Ranks that are not alone
        lose no more than `LOST_SECONDS` before whole steps show what replays save.
        """
        if self.between == torch.inf or self.training.is_growing or not self._is_peak_known():
            return False
        saved, cost = self._expected(tokens), self._recording_seconds or RECORDING_SECONDS + 4 * self.between
        is_enough = saved > LEAST_SAVING * self.between
        pays = saved * self.training.further(seen - 1) > MARGIN * cost
        is_shown = self._is_alone or self._saved_by_replays is not None
        return is_enough and pays and self._may_lose(cost) and (is_shown or self.lost < LOST_SECONDS)

    def _is_peak_known(self) -> bool:
        """Whether a step has ended that had the states of the optimizer next to it, which the first one makes, if there
        will be any.
        """
        return self.training.done > 1 or not (self._has_backward or self.training.left)

    def is_sure(self, tokens: int) -> bool:
        """Whether a recording is known to pay from the trials of others."""
        is_known = any(map(self.is_kept, self.trials))
        return is_known and self._expected(tokens) > SURE * LEAST_SAVING * self.between

    def _may_lose(self, seconds: float) -> bool:
        """Whether so many seconds, with those that were lost before, are little in relation to the training, or less
        than what replays save of it: of whole steps, or as trials say, which a rank that is alone may believe.
        """
        saving, left = self._saved_by_replays, self.training.further(self.calls)
        if saving is None:
            kept = [x.saved / self.between for x in self.trials if self._is_alone and self.is_kept(x)]
            saving = median(kept) if kept else 0.0
        else:
            layers, replays = map(len, self._steps.values())
            saving *= replays / (layers + replays)
        may_be_lost = LOST_PART * (self.calls + left) + saving * left
        return self.lost + seconds < LOST_SECONDS + self.between * may_be_lost

    def _expected(self, tokens: int) -> float:
        """The seconds that a replay of a number of tokens is expected to save: the host takes as long for any number,
        and the device in proportion.
        """
        if not self.trials:
            return 0.0 if self.is_busy else self.between / 2
        if any(tokens > WORTH_ANOTHER * x.tokens for x in self.trials if not self.is_kept(x)):
            return 0.0
        nearest = min(self.trials, key=lambda x: abs(x.tokens - tokens))
        return nearest.before - nearest.after * tokens / nearest.tokens

    def is_kept(self, trial: Trial) -> bool:
        """Whether a recording saves enough."""
        return trial.saved > LEAST_SAVING * self.between

    @contextmanager
    def making(self) -> Iterator[None]:
        """Takes the time of making a recording, and of its trial."""
        start = self._now()
        try:
            yield
        finally:
            self._recording_seconds = self._now() - start
            self.lost += self._recording_seconds
            self.interrupt()

    def is_slower(self) -> bool:
        """Whether replays are given back: if `WATCHED` whole steps are slower by them, or before, if the first ones
        are and have lost, with what recordings took, more than `LOST_SECONDS`.
        """
        saving, steps = self._saved_by_replays or 0.0, self._steps[True]
        if len(steps) == WATCHED:
            return saving < -SLOWER
        return saving < 0 and self.lost - saving * sum(x.seconds for x in steps) > LOST_SECONDS

    def saving(self, before: float, after: float) -> float:
        """The part of the time between two calls that a faster forward saves, whose backward takes twice as long."""
        passes = 3 if self._has_backward else 1
        return min(passes * (before - after) / self.between, 1 - after / before)

    def gain_of_compiling(self, parameters: int, noted: Compiled | None) -> float:
        """The seconds that compiled layers are expected to save, less those that they must.

        Args:
            parameters: of the model.
            noted: by an earlier process.
        """
        if self.between == torch.inf or self.calls < 3 * WARM_UP or self._since < 2 * WARM_UP:
            return -torch.inf
        seconds, saving = noted or Compiled(COMPILING_SECONDS, SMALL if parameters <= 2e9 else LARGE)
        if saving < LEAST_SAVING or (noted is None and not self._may_lose(TRYING_SECONDS)):
            return -torch.inf
        return saving * self.between * self.training.further(self.calls) - MARGIN * seconds


def is_on() -> bool:
    """Whether anything is decided: not where a run is to repeat another one to the bit, nor where gradients are
    differentiated again, as compiled layers cannot.
    """
    is_fixed = torch.are_deterministic_algorithms_enabled() or second_derivatives.uses
    return is_set(VARIABLE, default="1") and not is_fixed
