"""What is decided about graphs and compiled layers: in drawn worlds, whose clock is planted, and on several ranks."""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fastdpo import distributed
from fastdpo.distributed import STEPS_OF_NOTICE, Ballot
from fastdpo.models import pace
from fastdpo.models.graphs import rounded_up
from fastdpo.models.pace import LEAST_SAVING, MARGIN, Pace, Training, Trial
from fastdpo.models.running import GRAPHS, PAIRS
from fastdpo.ops import second_derivatives
from fastdpo.ops.choice.notes import Compiled
from tests.support.ref_logps import ranks as run_ranks

TOKENS = 1500
"""Of a batch of the size 1."""
CHOICES = "layers", "graphs", "compiled", "both"
BATCHES = 2000


@dataclass
class World:
    """Seconds of a device, of its host and of what is done once, and the sizes of batches.

    Attributes:
        host: that it takes to launch the layers.
        busy: that the device takes for a batch of the size 1.
        other: of a step, next to the layers.
        of_compiled: what compiled layers leave of both.
        noise: the relative standard deviation of what is measured.
        is_noted: whether an earlier process has noted what compiling takes and saves.
    """

    host: float
    busy: float
    other: float
    of_compiled: tuple[float, float]
    compiling: float
    recording: float
    noise: float
    sizes: np.ndarray
    steps: int
    is_noted: bool

    @classmethod
    def draw(cls, seed: int) -> "World":
        rng = np.random.default_rng(seed)

        def between(least, most):
            return float(np.exp(rng.uniform(np.log(least), np.log(most))))

        host = between(0.01, 0.2)
        busy = host * between(0.1, 8)
        return cls(
            host=host,
            busy=busy,
            other=rng.uniform(0.05, 0.6) * max(host, busy),
            of_compiled=(rng.uniform(0.4, 0.9), rng.uniform(0.5, 0.85)),
            compiling=between(8, 60),
            recording=rng.uniform(0.3, 1.5),
            noise=rng.uniform(0, 0.05),
            sizes=rng.lognormal(0, rng.uniform(0.05, 0.4), BATCHES),
            steps=int(between(200, 6000)),
            is_noted=bool(rng.integers(2)),
        )

    def layers(self, tokens: int, compiled: bool) -> float:
        host, _ = self.of_compiled if compiled else (1, 1)
        return max(host * self.host, self.replay(tokens, compiled))

    def replay(self, tokens: int, compiled: bool) -> float:
        return self.busy * tokens / TOKENS * (self.of_compiled[1] if compiled else 1)

    def train(self, choice: str) -> "Trained":
        return Trained(self, choice)


class Trained:
    """A training in a world, with a fixed choice or, if it is "auto", as the library decides.

    Attributes:
        seconds: that it took.
        compiled: whether layers were compiled at the end.
        recorded: the sizes of recordings that were kept.
    """

    def __init__(self, world: World, choice: str) -> None:
        self.world, self.seconds, self.is_auto = world, 0.0, choice == "auto"
        self.noted: Compiled | None = None
        self.compiled, self.recorded = choice in ("compiled", "both"), set()
        self.rng = np.random.default_rng(0)
        self.training = Training(left=world.steps)
        self.pace = Pace(self.training, lambda: self.seconds)
        self.seconds += world.compiling * self.compiled
        seen = Counter()
        for step in range(world.steps):
            tokens = int(world.sizes[step % BATCHES] * TOKENS) + 1
            size = rounded_up(tokens)
            seen[size] += 1
            self.training.done, self.training.left = step, world.steps - step
            self.pace.call()
            if self.is_auto:
                self.compile(tokens)
            if size not in self.recorded and seen[size] > 1:
                if choice in ("graphs", "both"):
                    self.seconds += world.recording
                    self.recorded.add(size)
                elif self.is_auto and self.pace.is_recorded(size, seen[size]):
                    self.record(tokens, size)
            replays = size in self.recorded
            self.seconds += world.replay(size, self.compiled) if replays else world.layers(tokens, self.compiled)
            self.seconds += world.other

    def measured(self, seconds: float) -> float:
        return seconds * (1 + self.world.noise * self.rng.standard_normal())

    def record(self, tokens: int, size: int) -> None:
        before, after = self.world.layers(tokens, self.compiled), self.world.replay(size, self.compiled)
        with self.pace.making() as make:
            self.seconds += self.world.recording + 2 * (before + after)
            if make(Trial(tokens, self.measured(before), self.measured(after))):
                self.recorded.add(size)

    def compile(self, tokens: int) -> None:
        """As `Runner` does."""
        world = self.world
        before, after = (self.measured(world.layers(tokens, compiled) / 3) for compiled in (False, True))
        saving, first = self.pace.saving(before, after), world.compiling / GRAPHS
        if self.noted is None and world.is_noted and self.pace.between < torch.inf:
            self.noted = Compiled(world.compiling, saving)
        if self.compiled or self.pace.gain_of_compiling(int(5e8), self.noted) <= 0:
            return
        if self.noted is None:
            self.seconds += first + PAIRS * (before + after)
            self.pace.interrupt()
            left = self.pace.between * self.training.further(self.pace.calls)
            if saving <= LEAST_SAVING or saving * left <= MARGIN * (world.compiling - first):
                self.noted = Compiled(world.compiling, 0.0)  # it is not tried again
                return
            self.seconds -= first
        self.seconds += world.compiling
        self.compiled = True
        self.recorded.clear()
        self.pace.change()


WORLDS = 200


def test_drawn_worlds():
    """No training takes longer than that of the layers, but for a hundredth and some seconds, and, of a model that is
    new, for what it takes to try compiled layers. Most are near the best choice.
    """
    near = []
    for seed in range(WORLDS):
        world = World.draw(seed)
        seconds = {choice: world.train(choice).seconds for choice in (*CHOICES, "auto")}
        tried = 0 if world.is_noted else world.compiling / GRAPHS + PAIRS * world.layers(2 * TOKENS, False)
        assert seconds["auto"] <= 1.01 * seconds["layers"] + 3 + tried, (seed, seconds)
        near.append(seconds["auto"] <= 1.05 * min(seconds[x] for x in CHOICES))
    assert np.mean(near) >= 0.8


@pytest.mark.parametrize("attribute", ["steps", "host"])
def test_more_to_gain_switches_nothing_off(attribute):
    for seed in range(40):
        world, more = World.draw(seed), World.draw(seed)
        world.noise = more.noise = 0
        setattr(more, attribute, 2 * getattr(world, attribute))
        before, after = world.train("auto"), more.train("auto")
        assert after.compiled >= before.compiled, seed
        assert bool(after.recorded) >= bool(before.recorded), seed


def clocked(*times, left=1000, done=10):
    """The pace of calls at these times."""
    now = iter(times)
    found = Pace(Training(done=done, left=left), lambda: next(now))
    for _ in times[1:]:
        found.call()
    return found


def test_the_first_call_and_what_interrupts_do_not_count():
    found = clocked(0, *range(100, 120))
    assert (found.calls, found.between) == (20, 1)
    found.interrupt()
    found._now = iter([1000, 1001]).__next__
    found.call()
    found.call()
    assert found.between == 1


def test_nothing_is_decided_in_the_first_calls():
    found = clocked(*range(pace.WARM_UP))
    assert found.between == torch.inf
    assert not found.is_recorded(100, 50)
    assert found.gain_of_compiling(1, Compiled(0.0, 0.5)) == -torch.inf


@pytest.mark.parametrize(("left", "is_recorded"), [(30, False), (3000, True)])
def test_what_was_lost_counts(left, is_recorded):
    """A recording of 2 s that was not kept is a twentieth of a training of 50 s, and little of a long one."""
    found = clocked(*range(21), left=left, done=20)
    found._now = iter([20.0, 22.0]).__next__
    with found.making() as make:
        assert not make(Trial(1000, 0.9, 0.89))
    assert found.is_recorded(500, 20) == is_recorded


def test_compiling_must_pay_in_what_is_left():
    short, long = (clocked(*range(40), left=left, done=40) for left in (80, 4000))
    assert short.gain_of_compiling(int(1e9), None) < 0 < long.gain_of_compiling(int(1e9), None)
    assert long.gain_of_compiling(int(8e9), None) < long.gain_of_compiling(int(1e9), None)
    assert long.gain_of_compiling(1, Compiled(1.0, LEAST_SAVING / 2)) == -torch.inf
    assert short.gain_of_compiling(1, Compiled(1.0, 0.2)) > 0


@pytest.mark.parametrize(("seconds", "is_slower"), [(1.1, True), (1.01, False), (0.5, False)])
def test_calls_that_become_slower_after_a_recording(seconds, is_slower):
    times = [*range(20), *(19 + seconds * i for i in range(1, 80))]
    found = Pace(Training(done=10, left=1000), iter(sorted([*times, 19.0, 19.0])).__next__)
    for _ in range(20):
        found.call()
    with found.making() as make:
        assert make(Trial(100, 0.9, 0.1))
    asked = []
    for _ in range(60):
        found.call()
        asked.append(found.is_slower())
    assert asked.count(True) == is_slower


def test_without_a_trainer_as_many_steps_are_expected_as_were_done():
    assert Training(done=7).further(3) == 3
    assert Training(done=10, left=90).further(2) == 18


def test_what_fixes_a_run(monkeypatch):
    assert pace.is_on()
    monkeypatch.setenv("FASTDPO_AUTO", "0")
    assert not pace.is_on()
    monkeypatch.delenv("FASTDPO_AUTO")
    monkeypatch.setattr(second_derivatives, "uses", [None])
    assert not pace.is_on()


def test_optimizers_count_steps_unless_a_trainer_does():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    training = pace.training()
    before = training.done
    optimizer.step()
    assert training.done == before + (training.left is None)
    own = pace.begin({})
    optimizer.step()
    assert (own.done, pace.training()) == (0, own)
    pace.trainings[:] = [training]


class Store:
    """A key-value store whose posts arrive late, in another order, or never."""

    def __init__(self, delay, lost=()):
        self.arrived, self.underway, self.delay, self.lost = {}, [], delay, lost

    def set(self, key, value):
        if not any(key.endswith(f"/{rank}") for rank in self.lost):
            self.underway.append([self.delay(), key, value])

    def tick(self):
        for post in self.underway:
            post[0] -= 1
        self.arrived.update({key: value for left, key, value in self.underway if left <= 0})
        self.underway = [x for x in self.underway if x[0] > 0]

    def check(self, keys):
        return all(key in self.arrived for key in keys)

    def get(self, key):
        return self.arrived[key]


def vote(monkeypatch, store, numbers, since, steps=60):
    """By rank, the step of the first result of each and the result."""
    monkeypatch.setattr(distributed, "store_of_ranks", lambda: store)
    ballots, found = [Ballot("asked") for _ in numbers], {}
    for ballot in ballots:
        ballot._key = "fastdpo/asked"  # each rank asks for the first time
    for step in range(steps):
        for rank in random.sample(range(len(numbers)), len(numbers)):
            monkeypatch.setattr(distributed, "rank_and_world_size", lambda rank=rank: (rank, len(numbers)))
            result = ballots[rank].smallest(step, numbers[rank] if step >= since[rank] else None)
            if result is not None:
                found.setdefault(rank, (step, result))
        store.tick()
    return found


def test_ranks_learn_the_smallest_number_in_the_same_step(monkeypatch):
    random.seed(0)
    for _ in range(50):
        since = [random.randrange(20) for _ in range(4)]
        store = Store(lambda: random.randrange(STEPS_OF_NOTICE))
        found = vote(monkeypatch, store, [3.0, 0.5, 2.0, 7.0], since)
        assert len(found) == 4
        assert len({*found.values()}) == 1
        (step, smallest), *_ = found.values()
        assert smallest == 0.5
        assert step >= max(since)


def test_a_rank_that_has_no_number_or_whose_post_is_lost_keeps_no_one_waiting(monkeypatch):
    assert vote(monkeypatch, Store(lambda: 0), [1.0, 1.0], [0, 100]) == {}
    assert vote(monkeypatch, Store(lambda: 0, lost=(1,)), [1.0, 1.0], [0, 0]) == {}


def test_a_result_that_comes_late_holds_at_once(monkeypatch):
    delays = iter([0, 0, 3 * STEPS_OF_NOTICE])
    found = vote(monkeypatch, Store(lambda: next(delays)), [1.0, 2.0], [0, 0])
    assert {result for _, result in found.values()} == {1.0}


def test_the_store_of_a_process_group(tmp_path):
    def asked(rank: int) -> list[float | None]:
        ballot, found = Ballot("asked"), []
        for step in range(5 * STEPS_OF_NOTICE):
            found.append(ballot.smallest(step, 3.0 - rank if step > 5 * rank else None))
            dist.barrier()
        return found

    first, second = run_ranks(2, tmp_path, asked)
    assert first == second
    assert {*first[::STEPS_OF_NOTICE]} == {None, 2.0}


def test_one_rank_has_its_own_number():
    ballot = Ballot("alone")
    assert ballot.smallest(0, None) is None
    assert ballot.smallest(1, 2.0) == 2.0


@pytest.mark.parametrize(
    ("has_backward", "left", "is_first"),
    [(True, 1000, False), (False, 1000, False), (True, None, False), (False, None, True)],
    ids=["policy", "reference", "custom loop", "evaluation"],
)
def test_nothing_is_recorded_before_an_optimizer_has_its_memory(has_backward, left, is_first):
    """The first step may accumulate more batches than are needed for a decision."""
    training = Training(left=left)
    found = Pace(training, (i / 100 for i in range(100)).__next__, has_backward=has_backward)
    for _ in range(20):
        found.call()
    assert found.is_recorded(TOKENS, 1000) == is_first
    training.done = 1
    assert found.is_recorded(TOKENS, 1000)
