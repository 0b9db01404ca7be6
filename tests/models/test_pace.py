"""What is decided about graphs and compiled layers: in drawn worlds, whose clock is planted, and on several ranks."""

import itertools
import os
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fastdpo import distributed
from fastdpo.distributed import STEPS_OF_NOTICE, Ballot
from fastdpo.models.running import pace
from fastdpo.models.running.graphs import rounded_up
from fastdpo.models.running.pace import BUSY, LEAST_SAVING, MARGIN, NEAREST, WATCHED, Pace, Training, Trial
from fastdpo.models.running.runner import GRAPHS, PAIRS
from fastdpo.ops import second_derivatives
from fastdpo.ops.choice.notes import Compiled
from tests.support.fuzzing import VARIABLE
from tests.support.ref_logps import ranks as run_ranks

TOKENS = 1500
"""Of a batch of the size 1."""
CHOICES = "layers", "graphs", "compiled", "both"
BATCHES = 2000
WORLDS = int(os.environ.get(VARIABLE, 600)) // 10
"""10,000 in `make fuzz`."""


@dataclass
class World:
    """Seconds of a device, of its host and of what is done once, and the sizes of batches.

    Attributes:
        host: that it takes to launch the layers.
        busy: that the device takes for a batch of the size 1.
        other: of a step, next to the layers.
        reduce: of the sums of ranks; 0 for one rank. Nine tenths of it may run next to the backward of the layers.
        exposed: the part of it that cannot run next to a replay.
        of_compiled: what compiled layers leave of the host's and of the device's time.
        compiling, recording: once, and once for each size.
        noise: the relative standard deviation of each time.
        ahead: the part of a forward that the host may be ahead of the device.
        sizes: of batches.
        steps: of the training.
        is_noted: whether an earlier process has noted what compiling takes and saves.
    """

    host: float
    busy: float
    other: float
    reduce: float
    exposed: float
    of_compiled: tuple[float, float]
    compiling: float
    recording: float
    noise: float
    ahead: float
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
            reduce=busy * between(0.01, 2) * int(rng.integers(2)),
            exposed=rng.uniform(0.25, 1),
            of_compiled=(rng.uniform(0.4, 1), rng.uniform(0.5, 1.05)),
            compiling=between(8, 60),
            recording=rng.uniform(0.3, 1.5),
            noise=rng.uniform(0, 0.05),
            ahead=rng.uniform(0.2, 1),
            sizes=rng.lognormal(0, rng.uniform(0.05, 0.4), BATCHES),
            steps=int(between(100, 20_000)),
            is_noted=bool(rng.integers(2)),
        )

    @property
    def tokens(self) -> np.ndarray:
        return (self.sizes * TOKENS).astype(int) + 1

    @property
    def padded(self) -> np.ndarray:
        return np.array([rounded_up(int(x)) for x in self.tokens])

    def backbone(self, compiled: bool, replays: bool) -> np.ndarray:
        """The seconds that each batch takes in it."""
        host, device = self.of_compiled if compiled else (1, 1)
        on_device = device * self.busy * (self.padded if replays else self.tokens) / TOKENS
        return on_device if replays else np.maximum(host * self.host, on_device)

    def step(self, compiled: bool, replays: bool) -> np.ndarray:
        """The seconds that each batch takes in all."""
        backbone = self.backbone(compiled, replays)
        waits = np.maximum((self.exposed if replays else 0.1) * self.reduce, self.reduce - 2 / 3 * backbone)
        return (backbone + self.other + waits) * (1 + self.noise * np.random.default_rng(1).standard_normal(BATCHES))

    def train(self, choice: str) -> float:
        """The seconds of a training with a fixed choice, which records each size when it is seen again."""
        compiled, batches = choice in ("compiled", "both"), np.resize(np.arange(BATCHES), self.steps)
        seconds, once = self.step(compiled, False)[batches], self.compiling * compiled
        if choice in ("graphs", "both"):
            _, first, times = np.unique(self.padded[batches], return_index=True, return_counts=True)
            replays = self.step(compiled, True)[batches]
            replays[first] = seconds[first]
            seconds, once = replays, once + self.recording * (times > 1).sum()
        return float(seconds.sum() + once)


class Trained:
    """A training in a world, as the library decides.

    Attributes:
        seconds: that it took.
        compiled: whether layers were compiled at the end.
        recorded: the sizes of recordings that were kept.
    """

    def __init__(self, world: World) -> None:
        self.world, self.seconds = world, 0.0
        self.noted: Compiled | None = None
        self.compiled, self.recorded = False, set()
        self.is_decided = self.is_stopped = False
        self.rng = np.random.default_rng(0)
        self.training = Training(left=world.steps)
        self.pace = Pace(self.training, lambda: self.seconds, is_alone=not world.reduce)
        ways = [(compiled, replays) for compiled in (False, True) for replays in (False, True)]
        self.steps, self.backbone = ({way: f(*way).tolist() for way in ways} for f in (world.step, world.backbone))
        tokens = world.tokens.tolist()
        self.sizes, seen = world.padded.tolist(), Counter()
        for step in range(world.steps):
            batch = step % BATCHES
            size = self.sizes[batch]
            seen[size] += 1
            self.training.done, self.training.left = step, world.steps - step
            self.pace.call()
            if not self.is_decided:
                self.compile(batch)
            if not self.is_stopped:
                self.record(batch, size, seen[size])
            self.pace.take(tokens[batch], is_replayed=size in self.recorded)
            self.seconds += self.steps[self.compiled, size in self.recorded][batch]

    def measured(self, seconds: float) -> float:
        return seconds * (1 + self.world.noise * self.rng.standard_normal())

    def record(self, batch: int, size: int, seen: int) -> None:
        """As `Graphs` does."""
        world, pace = self.world, self.pace
        if pace.is_slower():
            self.is_stopped = True
            self.recorded.clear()
            return
        layers, replay = (self.backbone[self.compiled, replays][batch] for replays in (False, True))
        if pace.is_busy is None and pace.between < torch.inf:
            host = self.world.of_compiled[0] ** self.compiled * world.host
            launched = max(host, layers * (1 - world.ahead))
            pace.is_busy = self.measured(layers) > BUSY * self.measured(launched)
            self.seconds += layers / 3
            pace.interrupt()
        if size in self.recorded or seen < 2 or not pace.is_recorded(size, seen):
            return
        is_kept = True
        with pace.making():
            self.seconds += world.recording
            if not pace.is_sure(size):
                self.seconds += 2 * (layers + replay)
                tokens = int(world.sizes[batch] * TOKENS) + 1
                trial = Trial(tokens, *(min(self.measured(x), self.measured(x)) for x in (layers, replay)))
                pace.trials.append(trial)
                is_kept = pace.is_kept(trial)
        if is_kept:
            self.recorded.add(size)

    def compile(self, batch: int) -> None:
        """As `Runner` does."""
        world, pace, first = self.world, self.pace, self.world.compiling / GRAPHS
        if world.is_noted and self.noted is None and pace.gain_of_compiling(1, Compiled(0.0, 1.0)) > 0:
            self.noted = Compiled(world.compiling, self.saving_of_steps())
        if pace.gain_of_compiling(int(5e8), self.noted) <= 0:
            return
        self.is_decided = True
        if self.noted is None:
            saving, before = self.saving(batch), self.backbone[False, False][batch]
            self.seconds += first + PAIRS * before + world.recording * bool(self.recorded)
            pace.interrupt()
            left = pace.between * self.training.further(pace.calls)
            if saving <= LEAST_SAVING or saving * left <= MARGIN * (world.compiling - first):
                pace.lost += first
                return
            self.seconds -= first
        elif self.noted.saving <= LEAST_SAVING:
            return
        self.seconds += world.compiling
        self.compiled = True
        self.recorded.clear()
        pace.change()

    def saving_of_steps(self) -> float:
        """What an earlier process has found that compiled layers save of whole steps."""
        replays = bool(self.recorded) and len(self.pace._steps[True]) >= NEAREST
        batches = [x for x in range(BATCHES) if not replays or self.sizes[x] in self.recorded]
        before, after = (self.steps[compiled, replays] for compiled in (False, True))
        others = self.rng.choice(batches, WATCHED)
        return float(np.median([1 - self.measured(after[x]) / self.measured(before[x]) for x in others]))

    def saving(self, batch: int) -> float:
        """What a trial of compiled layers finds, by replays if there are any."""
        forward = (self.backbone[compiled, bool(self.recorded)][batch] / 3 for compiled in (False, True))
        return self.pace.saving(*(np.median([self.measured(x) for _ in range(PAIRS)]) for x in forward))


def test_drawn_worlds():
    """Most trainings are near the best fixed choice, and nearly none takes longer than that of the layers, but for a
    hundredth and some seconds.

    No choice that does not know what compiling saves can be near the best one in all: a trial of up to 20 s may not be
    made in trainings of less than half an hour whose model no process has noted, where it would often pay.
    """
    near, over = [], []
    for seed in range(WORLDS):
        world = World.draw(seed)
        fixed, seconds = {choice: world.train(choice) for choice in CHOICES}, Trained(world).seconds
        near.append(seconds <= 1.05 * min(fixed.values()))
        if seconds > 1.01 * fixed["layers"] + 3:
            over.append((seed, seconds, fixed))
    print(f"near {np.mean(near):.4f}, over {len(over)}: {over[:20]}")
    assert len(over) <= 0.001 * WORLDS, over
    assert np.mean(near) >= 0.85


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


def test_layers_are_compiled_from_the_24th_call_and_the_16th_since_a_change():
    found = clocked(0, left=10_000)
    found._now = itertools.count().__next__

    def first():
        """The number of the call from which compiling pays."""
        while found.gain_of_compiling(1, Compiled(0.0, 0.5)) < 0:
            found.call()
        return found.calls

    assert first() == 24
    found.change()
    assert first() == 40


@pytest.mark.parametrize("is_busy", [True, False])
def test_nothing_is_recorded_where_the_device_is_busy(is_busy):
    found = clocked(*range(21))
    found.is_busy = is_busy
    assert found.is_recorded(100, 20) == (not is_busy)
    found.change()
    assert found.is_busy is None


def test_a_device_is_busy_if_it_takes_longer_than_the_host(monkeypatch):
    for waits, is_busy in ((1.0, True), (0.1, False)):
        now = iter([0, 0, 1, 1 + waits])
        monkeypatch.setattr(pace.time, "perf_counter", now.__next__)
        assert pace.is_busy(lambda: None, torch.device("cpu")) == is_busy


def test_a_recording_that_is_expected_to_save_much_needs_no_trial():
    found = clocked(*range(21))
    assert not found.is_sure(1000)
    found.trials += [Trial(1000, 0.9, 0.3), Trial(2000, 0.9, 0.6)]
    assert found.is_sure(1500)
    assert not found.is_sure(2900)


def test_trying_compiled_layers_must_be_affordable():
    """20 s are a hundredth of half an hour. Less will do if replays save as much."""
    short, long = (clocked(*range(40), left=left, done=40) for left in (1500, 2500))
    assert short.gain_of_compiling(1, None) < 0 < long.gain_of_compiling(1, None)
    assert short.gain_of_compiling(1, Compiled(45.0, 0.2)) > 0
    short.trials.append(Trial(1000, 0.9, 0.8))
    assert short.gain_of_compiling(1, None) > 0


@pytest.mark.parametrize(("left", "is_recorded"), [(30, False), (3000, True)])
def test_what_was_lost_counts(left, is_recorded):
    """A recording of 2 s that was not kept is a twentieth of a training of 50 s, and little of a long one."""
    found = clocked(*range(21), left=left, done=20)
    found._now = iter([20.0, 22.0]).__next__
    trial = Trial(1000, 0.9, 0.89)
    with found.making():
        found.trials.append(trial)
    assert not found.is_kept(trial)
    assert found.is_recorded(500, 20) == is_recorded


def stepped(before, after, steps, recording=1.0, **options):
    """The pace of 20 steps by layers, of a recording, and of others by replays. Seconds are by tokens of a batch."""
    clock, training = [0.0], Training(left=1000)
    found = Pace(training, lambda: clock[0], **options)
    for step in range(20 + steps):
        training.done += 1
        found.call()
        if step == 20:
            with found.making():
                found.trials.append(Trial(1000, 0.9, 0.1))
                clock[0] += recording
            found.call()
        tokens = 1000 + 100 * (step % 7)
        found.take(tokens, is_replayed=step >= 20)
        clock[0] += (after if step >= 20 else before)(tokens)
    return found


@pytest.mark.parametrize(
    ("slower", "steps", "is_slower"),
    [(1.5, 8, False), (1.5, 12, True), (1.03, 40, False), (1.03, 60, True), (1.01, 60, False), (0.5, 60, False)],
)
def test_replays_that_make_whole_steps_slower(slower, steps, is_slower):
    """As where ranks wait for gradients that come all at once: at once where they have lost much, at last at 2 %."""
    found = stepped(lambda tokens: tokens / 5000, lambda tokens: slower * tokens / 5000, steps)
    assert found.is_slower() == is_slower


def test_ranks_believe_whole_steps_alone():
    """The trial of a recording has seen nothing of what they wait for, in calls with gradients."""
    for options in ({}, {"is_alone": False}, {"is_alone": False, "has_backward": False}):
        is_alone = options.get("is_alone", True) or not options.get("has_backward", True)
        early, late = (stepped(lambda _: 1.0, lambda _: 0.5, n, 20.0, **options) for n in (5, 12))
        assert early._may_lose(20) == is_alone
        assert late._may_lose(20)


def test_what_a_change_saves_of_whole_steps():
    """Next to steps of the same kind with as many tokens."""
    found = stepped(lambda tokens: tokens / 1000, lambda _: 0.5, 60)
    found.change()
    clock = itertools.count()
    found._now = clock.__next__
    for step in range(WATCHED + 5):
        assert found.saved_by_change is None or step > WATCHED
        found.training.done += 1
        found.call()
        found.take(1600 if step < 40 else 1300, is_replayed=False)
    assert found.saved_by_change == pytest.approx(1 - 1 / 1.6)


def test_without_a_trainer_as_many_steps_are_expected_as_were_done():
    assert Training(done=7).further(3) == 3
    assert Training(done=10, left=90).further(2) == 18


def test_what_fixes_a_run(monkeypatch):
    assert pace.is_on()
    monkeypatch.setenv("FASTDPO_AUTO", "0")
    assert not pace.is_on()
    monkeypatch.setenv("FASTDPO_AUTO", "false")
    with pytest.raises(ValueError, match="FASTDPO_AUTO must be 0 or 1; got 'false'"):
        pace.is_on()
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
    for training.done in (0, 1):
        assert found.is_recorded(TOKENS, 1000) == is_first
    training.done = 2
    assert found.is_recorded(TOKENS, 1000)
