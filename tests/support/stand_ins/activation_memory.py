"""A device that plants its memory for `KeptActivations`, and layers that take of it what they are told to."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastdpo.models.running import activations, pace
from fastdpo.models.running.activations import FLAG, KeptActivations, Sizes
from fastdpo.ops import memory
from fastdpo.ops.memory import SHARE, VARIABLE, MemoryReport

CPU = torch.device("cpu")


@dataclass
class Device:
    """Memory of a device.

    Attributes:
        total, others: bytes of the device, and those that others use.
        used, peak: of this process.
    """

    total: float
    others: float = 0.0
    used: float = 0.0
    peak: float = 0.0

    def take(self, size: float) -> None:
        if self.used + size > self.total - self.others:
            raise torch.OutOfMemoryError("planted")
        self.used += size
        self.peak = max(self.peak, self.used)

    def give(self, size: float) -> None:
        self.used -= size

    def report(self) -> MemoryReport:
        return MemoryReport(*map(math.ceil, (self.used, self.peak, self.others, self.total)))

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "1")
        monkeypatch.setattr(memory, "read", lambda device: self.report())
        for known in (memory.peaks, memory.added_bytes, memory.held):
            monkeypatch.setattr(memory, known_name(known), {})


def known_name(known: object) -> str:
    return next(name for name, x in vars(memory).items() if x is known)


Law = tuple[float, float, float]
"""Bytes by tokens t: a + b t + c t^2."""


def by(law: Law, tokens: float) -> float:
    return law[0] + law[1] * tokens + law[2] * tokens**2


@dataclass
class World:
    """A training.

    Attributes:
        laws: of the bytes that autograd saves of each kind of layer.
        kinds: of the layers, in the order of the forward.
        width: bytes a token of the input of a layer.
        head: bytes a scored token.
        other: bytes a token of what runs between forward and backward.
        weights, states: bytes that stay from the beginning, and from the first step on.
        gradients: bytes of those of a layer, which a step begins without.
        accumulation, calls: backward passes of a step, and calls before each.
        sizes: tokens of a batch, and its scored ones, drawn by a function.
        steps: of the training.
    """

    laws: list[Law]
    kinds: list[int]
    width: float
    head: float
    other: float
    weights: float
    states: float
    gradients: float
    accumulation: int
    calls: int
    sizes: Callable[[], tuple[int, int]]
    steps: int
    neighbour: Callable[[int], float] = field(default=lambda step: 0.0)


def drawn(seed: int) -> World:
    draw = random.Random(seed)
    middle, spread = draw.choice([200, 1000, 5000]), draw.uniform(0.1, 0.8)

    def sizes() -> tuple[int, int]:
        tokens = max(2, int(draw.lognormvariate(math.log(middle), spread)))
        return tokens, max(1, int(tokens * draw.uniform(0.1, 0.9)))

    def law() -> Law:
        b = draw.uniform(5, 50)
        return draw.choice([0.0, 100 * b]), b, draw.choice([0.0, 0.0, b / middle])

    number = draw.randint(1, 12)
    laws = [law() for _ in range(draw.choice([1, 1, 2]))]
    growth = draw.choice([0.0, 0.0, draw.uniform(0, 0.2)])
    size = number * by(laws[0], middle)
    return World(
        laws,
        [draw.randrange(len(laws)) for _ in range(number)],
        draw.uniform(1, 4),
        draw.uniform(0, 100),
        draw.uniform(0, 30),
        size * draw.choice([0.1, 1.0, 5.0]),
        size * draw.choice([0.0, 1.0]),
        size / number * draw.choice([0.0, 0.1, 1.0]),
        draw.choice([1, 1, 4]),
        draw.choice([1, 1, 1, 2]),
        sizes,
        draw.randint(4, 30),
        lambda step: min(growth * step, 0.5),
    )


class Layer(SimpleNamespace):
    """What `KeptActivations` reads of a layer."""

    __hash__ = object.__hash__


class Simulation:
    """A training in a world on a device.

    Attributes:
        excess: the most that a call with kept layers has used above its limit.
        kept: the numbers of kept layers of all calls.
    """

    def __init__(self, world: World, device: Device, monkeypatch: pytest.MonkeyPatch, *, keeps: bool = True) -> None:
        self.world, self.device, self.keeps = world, device, keeps
        self.decides = KeptActivations("simulated")
        self.layers = [Layer(**{FLAG: True}, kind=kind) for kind in world.kinds]
        known = [Sizes() for _ in world.laws]
        found = [(layer, known[layer.kind]) for layer in self.layers], False
        device.plant(monkeypatch)
        monkeypatch.setattr(activations, "applies", lambda *_: self.keeps)
        monkeypatch.setattr(KeptActivations, "layers_of", lambda *_: found)
        monkeypatch.setattr(activations, "measured", self.measured)
        self.training = pace.Training()
        monkeypatch.setattr(pace, "trainings", [self.training])
        self.excess, self.kept = -math.inf, []

    def measured(self, layer: Layer, note: Callable[[float], None]) -> nullcontext:
        assert getattr(layer, FLAG), "a layer that is measured is recomputed"
        note(by(self.world.laws[layer.kind], self.tokens))
        return nullcontext()

    def run(self) -> Simulation:
        self.device.take(self.world.weights)
        for step in range(self.world.steps):
            self.training.done = step
            for part in range(self.world.accumulation):
                self.micro_batch(part)
            if step == 0:
                self.device.take(self.world.states)
            self.device.give(len(self.layers) * self.world.gradients)
        return self

    def micro_batch(self, part: int) -> None:
        calls = [self.call() for _ in range(self.world.calls)]
        if self.keeps:  # in the midst of a step
            self.device.others = self.world.neighbour(self.training.done) * self.device.total
        total = sum((state for state, _ in calls), torch.zeros(()))
        backward = [give for _, give in calls[::-1]]

        def run(_: Tensor) -> None:
            for give in backward:
                give(part == 0 and give is backward[0])

        total.register_hook(run)
        total.backward()

    def call(self) -> tuple[Tensor, Callable[[bool], None]]:
        """Runs the forward of a call. Returns its result, and a function that plays its backward."""
        world, device = self.world, self.device
        self.tokens, scored = world.sizes()
        tokens = self.tokens
        batch = SimpleNamespace(
            inputs={"input_ids": torch.zeros(1, tokens)}, layout=SimpleNamespace(score_index=range(scored))
        )
        limit = SHARE * device.total - device.others
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

        with self.decides.keeping(None, None, batch):
            self.decides.run(forward)
        is_kept = not all(flags)
        self.kept.append(flags.count(False))
        device.take(world.head * scored)
        keeps, self.keeps = self.keeps, False
        with self.decides.keeping(None, None, batch):  # as a reference, which may be the same model
            self.decides.run(lambda: device.take(world.other * tokens))
        self.keeps = keeps
        device.give(world.other * tokens)
        if is_kept:
            self.excess = max(self.excess, device.used - limit)

        def backward(makes_gradients: bool) -> None:
            device.give(world.head * scored)
            for layer, is_recomputed in zip(self.layers[::-1], flags[::-1], strict=True):
                size = by(world.laws[layer.kind], tokens)
                if is_recomputed:
                    device.take(size)
                if makes_gradients:
                    device.take(world.gradients)
                if is_kept:
                    self.excess = max(self.excess, device.used - limit)
                device.give(size + world.width * tokens)

        return state, backward
