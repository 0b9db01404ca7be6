"""A device that plants its memory, and trainings whose layers and heads take of it what they are told to."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fastdpo.integrations.trl.max_tokens.learned_tokens import LearnedTokens
from fastdpo.integrations.trl.max_tokens.planning import UnitPlanner
from fastdpo.models.running import activations, captures, pace
from fastdpo.models.running.activations import FLAG, KeptActivations, Sizes
from fastdpo.ops import memory
from fastdpo.ops.head.linear_logps import GPU_SHARE
from fastdpo.ops.memory import SHARE, VARIABLE, MemoryReport

GPU = torch.device("cuda")


@dataclass
class Device:
    """Memory of a device.

    Attributes:
        total, others: bytes of the device, and those that others use.
        used, peak: of this process.
        needed: the bytes of the smallest device in which it could have done the same next to others.
    """

    total: float
    others: float = 0.0
    used: float = 0.0
    peak: float = 0.0
    needed: float = 0.0

    @property
    def limit(self) -> float:
        return SHARE * self.total - self.others

    def take(self, size: float) -> None:
        if self.used + size > self.total - self.others:
            raise torch.OutOfMemoryError("planted")
        self.used += size
        self.peak = max(self.peak, self.used)
        self.needed = max(self.needed, self.used / (1 - self.others / self.total))

    def give(self, size: float) -> None:
        self.used -= size

    @contextmanager
    def unwinding(self) -> Iterator[None]:
        """A block that gives back what it has taken if memory runs out in it."""
        before = self.used
        try:
            yield
        except torch.OutOfMemoryError:
            self.used = before
            raise

    def report(self) -> MemoryReport:
        return MemoryReport(*map(math.ceil, (self.used, self.peak, self.others, self.total)))

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "1")
        monkeypatch.setattr(memory, "report", lambda device: self.report())
        monkeypatch.setattr(memory, "is_capturing", lambda device: False)
        monkeypatch.setattr(memory, "held", {})
        monkeypatch.setattr(memory, "spared", {})
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.used)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"device": GPU.index, "total_size": self.used}])


Law = tuple[float, float, float]
"""Bytes by tokens t: a + b t + c t^2."""


PROFILES = {
    "Capybara": (1160, 1.59),
    "HH": (186, 2.15),
    "MetaMath": (872, 3.91),
    "TL;DR": (416, 11.14),
    "HelpSteer": (775, 6.34),
    "UltraFeedback": (409, 0.42),
}
"""The median length of a row and the ratio of prompt and completion of published datasets."""


def by(law: Law, tokens: float) -> float:
    return law[0] + law[1] * tokens + law[2] * tokens**2


class Size(NamedTuple):
    """Of a batch: its tokens when it is packed and when it is padded, and those that are scored."""

    packed: int
    padded: int
    scored: int


@dataclass
class World:
    """A training of pairs by TRL's `DPOTrainer`, with gradient checkpointing.

    Attributes:
        laws: of the bytes that autograd saves of each kind of layer.
        kinds: of the layers, in the order of the forward.
        width: bytes a token of the input of a layer.
        tiles: bytes a scored token of the gradient tiles that fastdpo's head keeps; 0 if it is frozen.
        chunk: the bytes that any head takes, and that fastdpo's may keep in any case.
        other: bytes a token of what a reference takes between forward and backward.
        weights, states: bytes that stay from the beginning, and from the first step on.
        gradients: bytes of those of a layer, which a step begins without.
        lengths: of prompt, chosen and rejected completion of each pair, by steps.
        accumulation, calls: batches of a step, and calls before each backward.
        growth: the part of the device by which a neighbour grows in each step, up to a half.
    """

    laws: list[Law]
    kinds: list[int]
    width: float
    tiles: float
    chunk: float
    other: float
    weights: float
    states: float
    gradients: float
    lengths: list[list[tuple[int, int, int]]]
    accumulation: int
    calls: int
    growth: float

    def neighbour(self, step: int) -> float:
        """The part of the device that others use from within a step on."""
        return min(self.growth * step, 0.5)

    def batches(self, step: int) -> list[list[int]]:
        """The numbers of the pairs of each batch of a step."""
        return [x.tolist() for x in np.split(np.arange(len(self.lengths[step])), self.accumulation)]

    def size(self, step: int, pairs: list[int]) -> Size:
        lengths = [self.lengths[step][i] for i in pairs]
        longest = max(prompt + max(a, b) for prompt, a, b in lengths)
        return Size(sum(map(sum, lengths)), 2 * len(pairs) * longest, sum(a + b for _, a, b in lengths))


def world_of(
    draw: random.Random, profile: tuple[float, float], pairs: int, accumulation: int, steps: int, **law: Any
) -> World:
    """A training whose lengths follow a profile, with what is not given drawn."""
    median, ratio = profile
    spread = law.pop("spread", 0.6)
    completion = median / (1 + ratio)

    def length(typical: float) -> int:
        return max(2, min(4 * int(median), int(typical * math.exp(draw.gauss(0, spread)))))

    def unit() -> tuple[int, int, int]:
        return length(median - completion), length(completion), length(completion)

    def kind() -> Law:
        b = draw.uniform(5, 50)
        return draw.choice([0.0, 100 * b]), b, draw.choice([0.0, 0.0, b / (pairs * median)])

    is_full = law.pop("is_full", draw.random() < 0.5)
    number = draw.randint(1, 12)
    laws = [kind() for _ in range(draw.choice([1, 1, 2]))]
    size = number * by(laws[0], 2 * pairs * median)
    drawn = dict(
        laws=laws,
        kinds=[draw.randrange(len(laws)) for _ in range(number)],
        width=draw.uniform(1, 4),
        tiles=draw.uniform(0, 100) * is_full,
        chunk=size / number * draw.uniform(0, 0.5),
        other=draw.uniform(0, 30),
        weights=size * draw.choice([0.1, 1.0, 5.0]),
        states=size * draw.choice([0.0, 1.0]) * is_full,
        gradients=size / number * draw.choice([0.1, 1.0]) * is_full,
        lengths=[[unit() for _ in range(pairs * accumulation)] for _ in range(steps)],
        accumulation=accumulation,
        calls=1,
        growth=draw.choice([0.0, 0.0, draw.uniform(0, 0.2)]),
    )
    return World(**drawn | law)


def drawn(seed: int) -> World:
    draw = random.Random(seed)
    profile = draw.choice([60, 200, 1000]), draw.uniform(0.3, 12)
    pairs, accumulation = draw.choice([(2, 8), (4, 4), (1, 16), (8, 1), (4, 1), (2, 2)])
    calls = draw.choice([1, 1, 1, 2])
    steps, spread = draw.randint(4, 24), draw.uniform(0.1, 0.8)
    return world_of(draw, profile, pairs, accumulation, steps, spread=spread, calls=calls)


class Layer(SimpleNamespace):
    """What `KeptActivations` reads of a layer."""

    __hash__ = object.__hash__


class Trainer(SimpleNamespace):
    """What `LearnedTokens` reads of a trainer."""

    def __init__(self) -> None:
        super().__init__(args=SimpleNamespace(), state=SimpleNamespace(global_step=0, stateful_callbacks={}))
        self.accelerator = SimpleNamespace(device=GPU, num_processes=1, optimizer_step_was_skipped=False)


class Own(LearnedTokens):
    """Those of a trainer's own largest batch, where larger micro-batches always gain."""

    _useful = 10**12


class Simulation:
    """A training in a world on a device.

    Args:
        world: the training.
        device: its device.
        monkeypatch: plants it.
        spends: whether fastdpo spends memory on micro-batches and on activations.

    Attributes:
        excess: the most that calls which spend memory have used above their limit.
        kept: the numbers of kept layers of the calls of each step.
        micro_batches: the tokens of those of each step.
        trained: the pairs of each step that were trained on, in any order.
        repeated: the steps and calls that were run again, since memory had run out.
        rooms: of the calls that find room for a recording, the bytes that are left of the device when it is made and
            the largest call so far runs with all layers recomputed.
    """

    def __init__(self, world: World, device: Device, monkeypatch: pytest.MonkeyPatch, *, spends: bool = True) -> None:
        self.world, self.device, self.spends = world, device, spends
        self.decides, self.trainer = KeptActivations("simulated"), Trainer()
        self.own, self.has_failed = Own(self.trainer, "simulated", is_own=True), False
        self.layers = [Layer(**{FLAG: True}, kind=kind) for kind in world.kinds]
        known = [Sizes() for _ in world.laws]
        found = [(layer, known[layer.kind]) for layer in self.layers], False
        device.plant(monkeypatch)
        self.applies = spends
        monkeypatch.setattr(activations, "applies", lambda *_: self.applies)
        monkeypatch.setattr(KeptActivations, "layers_of", lambda *_: found)
        monkeypatch.setattr(activations, "measured", self.measured)
        monkeypatch.setattr(activations, "warn", lambda text: None)
        self.training = pace.Training()
        monkeypatch.setattr(pace, "trainings", [self.training])
        self.excess, self.limit = -math.inf, math.inf
        self.kept: list[list[int]] = []
        self.micro_batches: list[list[int]] = []
        self.trained: list[list[int]] = []
        self.repeated = 0
        self.rooms: list[float] = []
        self.most_tokens, self.recomputed = 0, 0.0  # what was in use in the largest call, with all layers recomputed
        self.has_gradients = False

    def measured(self, layer: Layer, note: Callable[[float], None]) -> nullcontext:
        assert getattr(layer, FLAG), "a layer that is measured is recomputed"
        note(by(self.world.laws[layer.kind], self.tokens))
        return nullcontext()

    def run(self) -> Simulation:
        self.device.take(self.world.weights)
        for step in range(len(self.world.lengths)):
            self.training.done = self.trainer.state.global_step = step
            self.has_gradients = False
            for of_steps in (self.kept, self.micro_batches, self.trained):
                of_steps.append([])
            self.run_step(step)
            if step == 0:
                self.device.take(self.world.states)
            self.device.give(len(self.layers) * self.world.gradients)
        return self

    def run_step(self, step: int) -> None:
        batches = self.world.batches(step)
        if self.spends and len(batches) > 1 and not self.has_failed:
            micro_batches = self.cut(step, batches)
            if len(micro_batches) <= len(batches):
                before = self.device.used
                self.limit = self.device.limit
                try:
                    return self.train(step, micro_batches, is_cut=True)
                except torch.OutOfMemoryError:
                    self.has_failed, self.has_gradients, self.device.used = True, False, before
                    self.repeated += 1
                    for of_steps in (self.kept, self.micro_batches, self.trained):
                        of_steps[-1].clear()
        return self.train(step, batches, is_cut=False)

    def cut(self, step: int, batches: list[list[int]]) -> list[list[int]]:
        world, sizes = self.world, [self.world.size(step, pairs) for pairs in batches]
        self.packed = max(x.packed for x in sizes)
        tokens = self.own.of_step(self.packed, max(x.padded for x in sizes))
        units = [
            [np.r_[np.full(prompt, 3 * i), np.full(x, 3 * i + j)] for j, x in ((1, chosen), (2, rejected))]
            for i, (prompt, chosen, rejected) in enumerate(world.lengths[step])
        ]
        planner = UnitPlanner(units, [1.0] * len(units), scored=[a + b for _, a, b in world.lengths[step]])
        runs = planner.fitting(tokens, self.packed, self.own.fits)
        self.own.ran(max(map(planner.size, runs)))
        return [planner.units(run) for run in runs]

    def train(self, step: int, micro_batches: list[list[int]], is_cut: bool) -> None:
        largest = max(micro_batches, key=lambda pairs: self.world.size(step, pairs).packed)
        for pairs in micro_batches:
            if is_cut and pairs is largest:
                self.own.begin_largest()
            self.micro_batch(step, pairs, is_cut)
        if is_cut:
            self.own.learn()

    def micro_batch(self, step: int, pairs: list[int], is_cut: bool) -> None:
        size = self.world.size(step, pairs)
        self.micro_batches[-1].append(size.packed)
        self.is_larger = is_cut and size.packed > self.packed
        calls = [self.call(size) for _ in range(self.world.calls)]
        self.device.others = self.world.neighbour(step) * self.device.total  # in the midst of a step
        total = sum((state for state, _ in calls), torch.zeros(()))
        backward = [give for _, give in calls[::-1]]

        def run(_: Tensor) -> None:
            for give in backward:
                give(not self.has_gradients)
                self.has_gradients = True

        total.register_hook(run)
        total.backward()
        self.trained[-1].extend(pairs)

    def taken(self, size: Size, head: float, are_recomputed: list[bool]) -> float:
        """The most bytes that a call takes, but for gradients."""
        tokens = size.packed if self.spends else size.padded
        saved = [by(self.world.laws[layer.kind], tokens) for layer in self.layers]
        held = [self.world.width * tokens + x * (not flag) for x, flag in zip(saved, are_recomputed, strict=True)]
        of_layers = [sum(held[: i + 1]) + saved[i] * flag for i, flag in enumerate(are_recomputed)]
        return max(sum(held) + head + self.world.other * tokens, *of_layers)

    def see(self, limit: float) -> None:
        self.excess = max(self.excess, self.device.used - limit)

    def call(self, size: Size) -> tuple[Tensor, Callable[[bool], None]]:
        """Runs the forward of a call as `scoring.score` does. Returns its result, and a function that plays its
        backward.
        """
        while True:
            try:
                with self.device.unwinding():
                    return self.run_call(size)
            except torch.OutOfMemoryError:
                if not self.decides.release():
                    raise
                self.repeated += 1

    def run_call(self, size: Size) -> tuple[Tensor, Callable[[bool], None]]:
        world, device = self.world, self.device
        self.tokens = tokens = size.packed if self.spends else size.padded
        ids = SimpleNamespace(device=GPU, shape=(1, tokens))
        batch = SimpleNamespace(
            inputs={"input_ids": ids}, layout=SimpleNamespace(score_index=range(size.scored), rows=None)
        )
        limit = device.limit
        state = torch.zeros((), requires_grad=True) * 1.0
        flags: list[bool] = []

        def forward() -> SimpleNamespace:
            flags.extend(getattr(layer, FLAG) for layer in self.layers)
            for layer, is_recomputed in zip(self.layers, flags, strict=True):
                device.take(world.width * tokens)
                size = by(world.laws[layer.kind], tokens)
                if not is_recomputed:
                    device.take(size)
            return SimpleNamespace(last_hidden_state=state)

        used, others = device.used, device.others
        with self.decides.keeping(None, None, batch):
            is_seen = self.training.done > 1 and tokens <= self.most_tokens  # what is recorded
            has_room = self.spends and is_seen and captures.has_room(GPU)
            self.decides.run(forward)
        is_kept = not all(flags)
        self.kept[-1].append(flags.count(False))
        head = world.chunk
        if self.spends:
            head = max(world.chunk, min(world.tiles * size.scored, device.total / GPU_SHARE, memory.left(GPU)))
        self.most_tokens = max(self.most_tokens, tokens)
        self.recomputed = max(self.recomputed, used + self.taken(size, head, [True] * len(flags)))
        if has_room:
            self.rooms.append(device.total - others - self.recomputed - self.taken(size, head, flags))
        device.take(head)
        self.applies, applied = False, self.applies
        with self.decides.keeping(None, None, batch):  # as a reference, which may be the same model
            self.decides.run(lambda: device.take(world.other * tokens))
        self.applies = applied
        spent = limit if is_kept else self.limit if self.is_larger else math.inf
        self.see(spent)
        device.give(world.other * tokens)

        def backward(makes_gradients: bool) -> None:
            device.give(head)
            for layer, is_recomputed in zip(self.layers[::-1], flags[::-1], strict=True):
                size = by(world.laws[layer.kind], tokens)
                if is_recomputed:
                    device.take(size)
                if makes_gradients:
                    device.take(world.gradients)
                self.see(spent)
                device.give(size + world.width * tokens)

        return state, backward


def least_device(world: World) -> float:
    """The bytes of the smallest device in which the trainer itself runs, padded and with all layers recomputed."""
    device = Device(1e30)
    with pytest.MonkeyPatch.context() as monkeypatch:
        Simulation(world, device, monkeypatch, spends=False).run()
    return (1 + 1e-9) * device.needed
