"""The LM head alone: log-probs from hidden states, forward and backward, of several libraries."""

from __future__ import annotations

import torch

from benchmarks import machine
from benchmarks.cases import Case, Side, Suite
from benchmarks.sides.heads import DESCRIPTIONS, PEERS, HeadWorkload
from fastdpo.ops.head.results import LOGGED_STATISTICS

SHAPES = (  # N scored tokens, V vocabulary, D hidden size
    (1024, 32_000, 256),  # the head in the suite `step`
    (4096, 32_000, 256),  # its gradient tiles exceed the memory budget
    (1024, 32_000, 1024),  # a wider model
    (256, 151_936, 896),  # the head of Qwen2-0.5B
)
SHAPES_OF_EXTRAS = SHAPES[::3]
EXTRAS = {  # what is added to the name of a group: the statistics, and whether log-probs are summed
    ", with entropy": (("entropy",), False),
    ", with statistics": (LOGGED_STATISTICS, False),
    ", summed": ((), True),
}
COMPUTING = {  # by statistics, the heads that compute them. Compiled, the mean of 151,936 logits is too inaccurate.
    (): tuple(PEERS),
    ("entropy",): ("plain PyTorch", "plain PyTorch, compiled", "TRL", "Liger, scaled", "fastdpo"),
    LOGGED_STATISTICS: ("plain PyTorch", "TRL", "fastdpo"),
}
EVERY_TILE = "fastdpo, every gradient tile kept"
QUICK_SHAPES = ((64, 500, 16),)
GPU_HEADS = ((128_256, 4096), (151_936, 896), (151_936, 4096), (256_000, 2304))  # Llama 3, Qwen (twice), Gemma 2
GPU_SHAPES = tuple((n, v, d) for v, d in GPU_HEADS for n in (1024, 4096, 16_384, 65_536))
GPU_SHAPES_OF_EXTRAS = tuple((16_384, v, d) for v, d in GPU_HEADS)


def build_cases(quick: bool) -> list[Case]:
    on_gpu = machine.on_gpu()
    shapes, of_extras = (GPU_SHAPES, GPU_SHAPES_OF_EXTRAS) if on_gpu else (SHAPES, SHAPES_OF_EXTRAS)
    dtype = "bfloat16" if on_gpu else "float32"
    groups = [("", (), False, shapes), *((name, *extra, of_extras) for name, extra in EXTRAS.items())]
    cases = []
    for name, statistics, summed, of_group in groups:
        for trainable in (True, False):
            for n, v, d in QUICK_SHAPES if quick else of_group:
                work = HeadWorkload(n, v, d, trainable, dtype, statistics, summed)
                group = f"{'trainable' if trainable else 'frozen'}{name}"
                cases.append(Case(str(work), group, sides(work, on_gpu), {"dtype": dtype}))
    return cases


def sides(work: HeadWorkload, on_gpu: bool) -> tuple[Side, ...]:
    """The heads that can compute what the workload asks for."""
    options = {peer: {"peer": peer} for peer in COMPUTING[work.statistics]}
    if on_gpu and work.trainable:
        options[EVERY_TILE] = {"peer": "fastdpo", "memory_budget": work.n * work.v * torch.float32.itemsize}
    return tuple(Side(name, "benchmarks.sides.heads:HeadStep", work, x) for name, x in options.items())


SUITE = Suite(
    name="head",
    title="LM head: log-probs from hidden states, forward and backward",
    truth="benchmarks.sides.heads:ExactHead",
    cases=build_cases,
    rounds=3,
    share_process_on_gpu=True,
    descriptions=DESCRIPTIONS | {EVERY_TILE: "the same with a `memory_budget` that holds all logits."},
)
