"""A model of DPO steps on many GPUs: time, memory, collectives, and what bounds them.

    python -m benchmarks.scaling_model [--predict] [--page FILE]

Nothing here is measured on a GPU. A step is the sum of few terms, each an amount over a rate:

    phase  = max(compute of the slowest rank, collectives)        collectives run during compute
    step   = policy forward + reference forward + backward + optimizer

- *compute*: floating-point operations (`fastdpo.batching.CostModel`) over the rate that a published
  training of the same model reached, which includes attention, norms and launches. Gradient
  checkpointing is on, so the policy's forward runs twice; the backward takes two forwards.
- *slowest rank*: ranks wait for each other in every layer. Lengths are drawn from the length
  profiles of the suite `step`, once for each rank.
- *collectives*: bytes of each unit over the bandwidth of a ring, and the latency of its hops.
- *optimizer*: AdamW in float32 reads 16 and writes 12 bytes per parameter of its shard.

`--predict` writes benchmarks/results/scaling_model.json, from which docs/scaling.md is made.
`benchmarks.scaling_check` measures steps of gloo ranks, with which the same terms are compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.sides import workload as w
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths
from benchmarks.suites.step import BOUNDS, PROFILES, SPREAD
from fastdpo.batching import CostModel, StepPlanner
from fastdpo.lengths import PairLengths

RESULTS = Path(__file__).parent / "results"
PREDICTIONS = RESULTS / "scaling_model.json"

SIZES = {
    "8B": ModelSize(32, 4096, 14_336, 32, 8, 128_256),
    "70B": ModelSize(80, 8192, 28_672, 64, 8, 128_256),
}
"""Llama 3."""

RANKS = 8, 32, 128, 512, 1024
PAIRS = 8  # of each GPU and step
STEPS = 8  # over which loads are averaged
DATASET = "UltraFeedback"
SIDES = "stock", "patched", "balanced"
HALF, SINGLE = 2, 4  # bytes of an element


@dataclass(frozen=True)
class Cluster:
    """Devices and their network. Bandwidths are bytes a second and device, in one direction.

    Attributes:
        rate: floating-point operations a second that a training reaches.
        devices: of a node.
        local, network: bandwidth inside a node, and of the network card of each device.
        base_latency, local_latency, network_latency: seconds of a collective, and of each hop.
        copy: bytes a second of the device's memory.
        memory: bytes of a device.
        overlap: whether collectives run during compute.
    """

    rate: float
    devices: int
    local: float
    network: float
    base_latency: float = 0.0
    local_latency: float = 0.0
    network_latency: float = 0.0
    copy: float = float("inf")
    memory: float = float("inf")
    overlap: bool = True

    def ring_seconds(self, size: float, ranks: int, *, one_per_node: bool = False) -> float:
        """Seconds of an all-gather to, or a reduce-scatter from, `size` bytes on every rank.

        A ring through whole nodes uses all of their network cards; one with a single rank on each
        node uses one.
        """
        if ranks == 1:
            return 0.0
        nodes = ranks if one_per_node else -(-ranks // self.devices)
        cards = 1 if one_per_node else self.devices
        bandwidth = self.local if nodes == 1 else min(self.local, cards * self.network)
        hops_between = nodes - 1
        latency = hops_between * self.network_latency + (ranks - 1 - hops_between) * self.local_latency
        return self.base_latency + latency + size * (ranks - 1) / ranks / bandwidth


@dataclass(frozen=True)
class Model:
    """A model as collectives and optimizers see it.

    Attributes:
        cost: floating-point operations of a forward pass.
        units: parameters of each unit that is gathered at once: embeddings, layers, and at last the
            norm and the head.
        hidden: as in `ModelSize`.
    """

    cost: CostModel
    units: tuple[int, ...]
    hidden: int

    @classmethod
    def of_size(cls, size: ModelSize) -> Model:
        with torch.device("meta"):
            model: Any = w.AutoModelForCausalLM.from_config(config_of(size))
        modules = [model.model.embed_tokens, *model.model.layers, nn.ModuleList([model.model.norm, model.lm_head])]
        units = tuple(sum(p.numel() for p in module.parameters()) for module in modules)
        return cls(CostModel.of_model(model), units, size.hidden)

    @property
    def parameters(self) -> int:
        return sum(self.units)

    @property
    def layers(self) -> int:
        return len(self.units) - 2


def config_of(size: ModelSize) -> Any:
    return w.AutoConfig.for_model("llama", **w.decoder_entries(Workload((), size=size)))


@dataclass(frozen=True)
class Engine:
    """How ranks share a model.

    Attributes:
        tensor_parallel: ranks of a node that share each layer.
        keeps_head: whether the head stays gathered after a forward, in the policy until its backward
            and in the reference for good.
    """

    tensor_parallel: int = 1
    keeps_head: bool = True


ENGINES = {"FSDP2": Engine(), "ZeRO-3": Engine(keeps_head=False), "TP 8 x FSDP2": Engine(tensor_parallel=8)}


class Traffic(NamedTuple):
    """The collectives of a rank in one step, by the elements of whole tensors.

    Attributes:
        forward, reference, backward: units that are gathered in the policy's forward, in that of the
            reference, and in the backward.
        reduced: units whose gradients are reduced and scattered.
        activations: elements per token of a forward that tensor parallelism all-reduces, each time.
    """

    forward: tuple[int, ...]
    reference: tuple[int, ...]
    backward: tuple[int, ...]
    reduced: tuple[int, ...]
    activations: tuple[int, ...] = ()


def traffic(model: Model, engine: Engine) -> Traffic:
    """The collectives of a step with gradient checkpointing.

    Tensor parallelism all-reduces twice in each layer: in both forwards, in the one that is
    recomputed, and in the backward.
    """
    t = engine.tensor_parallel
    units = tuple(unit // t for unit in model.units)
    again = units[:-1] if engine.keeps_head else units
    return Traffic(units, again, again, units, (model.hidden,) * 8 * model.layers if t > 1 else ())


class Load(NamedTuple):
    """Operations of a forward pass, as means over steps.

    Attributes:
        mean: of all ranks.
        slowest: of the rank with the most.
        tokens: of the mean rank.
    """

    mean: float
    slowest: float
    tokens: float


def lengths_of(pairs: Sequence[w.Lengths]) -> PairLengths:
    """The lengths of pairs whose rows share the prompt and nothing else."""
    prompt, chosen, rejected = np.array(pairs, np.int64).T
    return PairLengths(prompt + chosen, prompt + rejected, chosen, rejected, prompt, prompt)


def drawn_lengths(dataset: str, pairs: int, seed: int) -> PairLengths:
    """Lengths of pairs, drawn as in the suite `step`."""
    return lengths_of(draw_lengths(*PROFILES[dataset], pairs, seed, spread=SPREAD, bounds=BOUNDS))


def padded_costs(cost: CostModel, lengths: PairLengths, ranks: int, *, labelled: bool = True) -> np.ndarray:
    """Operations of TRL's forward on each rank, float64 [ranks]. Attention computes the whole square.

    Args:
        labelled: whether the head scores labelled positions only, as TRL does on GPUs.
    """
    width = lengths.longest.reshape(ranks, -1).max(1).astype(float)
    rows = 2 * len(lengths) // ranks
    scored = lengths.scored(share=False).reshape(ranks, -1).sum(1) if labelled else rows * (width - 1)
    return rows * (cost.token * width + cost.attended * width**2) + cost.scored * scored


def balanced_costs(cost: CostModel, lengths: PairLengths, ranks: int) -> np.ndarray:
    """Operations of each rank where pairs are distributed by cost, float64 [ranks].

    The budget is the tokens of the rank that has most of them without it.
    """
    budget = int(lengths.packed().reshape(ranks, -1).sum(1).max())
    planner = StepPlanner(lengths, budget, ranks=ranks, cost=cost)
    return np.sum([[planner.cost_of(pairs) for pairs in each] for each in planner.cut(range(len(lengths)))], axis=0)


def loads(dataset: str, cost: CostModel, ranks: int, pairs: int, steps: int = STEPS) -> dict[str, Load]:
    """The loads of each side, with `pairs` pairs on each rank."""
    found = {side: [] for side in SIDES}
    for seed in range(steps):
        lengths = drawn_lengths(dataset, ranks * pairs, seed)
        padded = lengths.longest.reshape(ranks, -1).max(1).mean() * 2 * pairs
        packed = lengths.packed().mean() * pairs
        packed_costs = cost.costs(lengths).reshape(ranks, -1).sum(1)
        sides = padded_costs(cost, lengths, ranks), packed_costs, balanced_costs(cost, lengths, ranks)
        for side, costs, tokens in zip(SIDES, sides, (padded, packed, packed), strict=True):
            found[side].append((costs.mean(), costs.max(), tokens))
    return {side: Load(*np.mean(of_steps, 0).tolist()) for side, of_steps in found.items()}


class Phase(NamedTuple):
    """Seconds of a part of a step.

    Attributes:
        mean, slowest: compute of the mean and of the slowest rank.
        collectives: of the engine, during compute.
    """

    mean: float
    slowest: float
    collectives: float


class Step(NamedTuple):
    """Seconds of a step by what they are spent on.

    Attributes:
        compute: of the mean rank.
        waiting: for the slowest rank.
        collectives: those of the engine that compute does not hide.
        activations: all-reduces of tensor parallelism.
        optimizer: AdamW.
    """

    compute: float
    waiting: float
    collectives: float
    activations: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def by_size(self) -> list[str]:
        """The names of the terms, the largest first."""
        return sorted(self._fields, key=self._asdict().get, reverse=True)


def step_of(phases: list[Phase], overlap: bool, **others: float) -> Step:
    hidden = [phase.slowest if overlap else 0.0 for phase in phases]
    exposed = sum(max(phase.collectives - x, 0.0) for phase, x in zip(phases, hidden, strict=True))
    mean, slowest = (sum(phase[i] for phase in phases) for i in (0, 1))
    return Step(mean, slowest - mean, exposed, **others)


def predict(cluster: Cluster, model: Model, engine: Engine, ranks: int, load: Load) -> Step:
    """The time of a step.

    Args:
        load: of a group of `engine.tensor_parallel` ranks.
    """
    t = engine.tensor_parallel
    amounts = traffic(model, engine)

    def seconds(units: tuple[int, ...]) -> float:
        return sum(cluster.ring_seconds(HALF * unit, ranks // t, one_per_node=t > 1) for unit in units)

    mean, slowest = load.mean / t / cluster.rate, load.slowest / t / cluster.rate
    forward = Phase(mean, slowest, seconds(amounts.forward))
    reference = Phase(mean, slowest, seconds(amounts.reference))
    backward = Phase(3 * mean, 3 * slowest, seconds(amounts.backward) + seconds(amounts.reduced))
    all_reduces = (2 * cluster.ring_seconds(HALF * load.tokens * n, t) for n in amounts.activations)
    return step_of(
        [forward, reference, backward],
        cluster.overlap,
        activations=sum(all_reduces),
        optimizer=28 * model.parameters / ranks / cluster.copy,
    )


H100 = Cluster(
    rate=0.0,
    devices=8,
    local=360e9,
    network=50e9,
    base_latency=8.4e-6,
    local_latency=3.4e-6,
    network_latency=14e-6,
    copy=3.35e12,
    memory=80e9,
)
"""H100 SXM nodes. `docs/scaling.md` lists the sources. The rate follows from `PRETRAINING`."""


@dataclass(frozen=True)
class Pretraining:
    """Published trainings of Llama 3.1 8B under FSDP2 in bfloat16, without `torch.compile`.

    torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: two sequences on each H100.
    """

    length: int = 8192
    sequences: int = 2
    tokens_per_second: dict[int, int] = field(default_factory=lambda: {8: 5762, 128: 5605})

    def load(self, cost: CostModel) -> Load:
        tokens = self.length * self.sequences
        operations = tokens * (cost.token + cost.scored + cost.attended * (self.length + 1) / 2)
        return Load(operations, operations, tokens)

    def rate(self, cost: CostModel, ranks: int) -> float:
        """Operations a second of each GPU, with three forwards for forward and backward."""
        load = self.load(cost)
        return 3 * load.mean * self.tokens_per_second[ranks] / load.tokens

    def predict(self, cluster: Cluster, model: Model, ranks: int) -> float:
        """Tokens a second and GPU. Gradients are reduced in float32."""
        load = self.load(model.cost)
        seconds = load.mean / cluster.rate
        gather, reduce = (sum(cluster.ring_seconds(x * unit, ranks) for unit in model.units) for x in (HALF, SINGLE))
        phases = [Phase(seconds, seconds, gather), Phase(2 * seconds, 2 * seconds, gather + reduce)]
        optimizer = 28 * model.parameters / ranks / cluster.copy
        return load.tokens / step_of(phases, True, optimizer=optimizer).total


PRETRAINING = Pretraining()


def h100() -> Cluster:
    """H100 nodes at the rate of the published training on one node."""
    return replace(H100, rate=PRETRAINING.rate(Model.of_size(SIZES["8B"]).cost, H100.devices))


class Memory(NamedTuple):
    """Bytes of a GPU.

    Attributes:
        states: weights, gradients and AdamW in float32, and the reference's weights.
        gathered: in bfloat16, the heads of both models, the next layer, and the largest unit's gradient.
        step: activations, and the head or the reference's forward.
    """

    states: float
    gathered: float
    step: float

    @property
    def total(self) -> float:
        return sum(self)


class StepMemory(NamedTuple):
    """Bytes of a step on one GPU.

    Attributes:
        activations: kept from the policy's forward.
        temporary: the most that its head, its backward or the reference need besides.
    """

    activations: int
    temporary: int


def memory(model: Model, engine: Engine, ranks: int, of_step: StepMemory) -> Memory:
    """Memory of a GPU."""
    t = engine.tensor_parallel
    states = (4 * SINGLE + SINGLE) * model.parameters / ranks
    head, layer = model.units[-1], model.units[1]
    gathered = HALF * (2 * head + layer + max(model.units)) / t if ranks > t else 0.0
    return Memory(states, gathered, t * of_step.activations + of_step.temporary)


def step_memory(size: ModelSize, pairs: int) -> dict[str, StepMemory]:
    """The memory of each side, by a step on tensors without memory.

    The batch is the one with the longest row among those of 64 ranks.
    """
    from fastdpo.estimate.simulation import Setup, simulate
    from fastdpo.ref_logps.pairs import Pairs

    ranks = [draw_lengths(*PROFILES[DATASET], pairs, seed, spread=SPREAD, bounds=BOUNDS) for seed in range(64)]
    longest = max(ranks, key=lambda batch: lengths_of(batch).longest.max())
    rows = w.examples(Workload((longest,), size=size), 0)
    limit = int(H100.memory)
    setup = Setup(config_of(size), "cuda", limit, dtype=torch.bfloat16, autocast=False)
    found = {}
    for side in ("stock", "patched"):
        x = simulate(setup, Pairs(rows).collate(rows), patched=side == "patched")
        found[side] = StepMemory(x.activations, max(x.head, x.reference, x.step - x.gradients - x.activations))
    return found | {"balanced": found["patched"]}


def predictions() -> list[dict[str, Any]]:
    """Every model, engine, number of ranks and side, in seconds and bytes."""
    cluster = h100()
    found = []
    for name, size in SIZES.items():
        model, of_step = Model.of_size(size), step_memory(size, PAIRS)
        for engine_name, engine in ENGINES.items():
            t = engine.tensor_parallel
            for ranks in RANKS:
                of_sides = loads(DATASET, model.cost, ranks // t, PAIRS * t)
                for side, load in of_sides.items():
                    case = dict(model=name, engine=engine_name, ranks=ranks, side=side)
                    step = predict(cluster, model, engine, ranks, load)
                    needed = memory(model, engine, ranks, of_step[side])
                    found.append(case | {"seconds": step._asdict(), "bytes": needed._asdict()})
    return found


def result() -> dict[str, Any]:
    """The contents of `PREDICTIONS`."""
    cost = Model.of_size(SIZES["8B"]).cost
    waiting = {
        dataset: {side: load.slowest / load.mean for side, load in loads(dataset, cost, 128, PAIRS).items()}
        for dataset in PROFILES
    }
    return {"predictions": predictions(), "waiting": waiting}


def main() -> None:
    from benchmarks import scaling_page

    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling_model", description=__doc__.splitlines()[0])
    parser.add_argument("--predict", action="store_true", help="compute the predictions again")
    args = parser.parse_args()
    if args.predict:
        PREDICTIONS.write_text(json.dumps(result(), indent=1) + "\n")
    scaling_page.write()


if __name__ == "__main__":
    main()
