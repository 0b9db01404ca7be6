"""The LM head alone: log-probs from hidden states, forward and backward, of several libraries."""

from __future__ import annotations

import torch

from benchmarks.cases import Case, Side, Suite
from benchmarks.sides.heads import PEERS, HeadWorkload

SHAPES = (  # N scored tokens, V vocabulary, D hidden size
    (1024, 32_000, 256),  # the head in the suite `step`
    (4096, 32_000, 256),  # its gradient tiles exceed the memory budget
    (1024, 32_000, 1024),  # a wider model
    (256, 151_936, 896),  # the head of Qwen2-0.5B
)
EVERY_TILE = "fastdpo, every gradient tile kept"
QUICK_SHAPES = ((64, 500, 16),)
GPU_HEADS = ((128_256, 4096), (151_936, 896), (151_936, 4096), (256_000, 2304))  # Llama 3, Qwen (twice), Gemma 2
GPU_SHAPES = tuple((n, v, d) for v, d in GPU_HEADS for n in (1024, 4096, 16_384, 65_536))


def build_cases(quick: bool) -> list[Case]:
    on_gpu = torch.cuda.is_available()
    shapes, dtype = (GPU_SHAPES, "bfloat16") if on_gpu else (SHAPES, "float32")
    cases = []
    for trainable in (True, False):
        for n, v, d in QUICK_SHAPES if quick else shapes:
            work = HeadWorkload(n, v, d, trainable, dtype)
            options = {peer: {"peer": peer} for peer in PEERS}
            if on_gpu and trainable:
                options[EVERY_TILE] = {"peer": "fastdpo", "memory_budget": n * v * torch.float32.itemsize}
            sides = tuple(Side(name, "benchmarks.sides.heads:HeadStep", work, x) for name, x in options.items())
            cases.append(Case(str(work), "trainable" if trainable else "frozen", sides, {"dtype": dtype}))
    return cases


SUITE = Suite(
    name="head",
    title="LM head: log-probs from hidden states, forward and backward",
    truth="benchmarks.sides.heads:ExactHead",
    cases=build_cases,
    rounds=7,
    share_process_on_gpu=True,
)
