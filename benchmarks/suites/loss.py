"""The DPO loss of pairs from hidden states: loss and gradients, of several libraries."""

from __future__ import annotations

from benchmarks import machine
from benchmarks.cases import Case, Side, Suite
from benchmarks.sides.losses import DESCRIPTIONS, LOSSES, LossWorkload
from benchmarks.sides.workload import draw_lengths
from benchmarks.suites.step import BOUNDS, SPREAD, profiles

PAIRS = 6
HEADS = ((32_000, 256), (32_000, 1024))  # V vocabulary, D hidden size
QUICK_HEADS = ((500, 16),)
GPU_PAIRS = 32
GPU_HEADS = ((128_256, 4096), (151_936, 896))  # Llama 3, Qwen
DATASETS = ("HH", "UltraFeedback")


def build_cases(quick: bool) -> list[Case]:
    on_gpu = machine.on_gpu()
    heads, dtype = (GPU_HEADS, "bfloat16") if on_gpu else (HEADS, "float32")
    cases = []
    for trainable in (True, False):
        for v, d in QUICK_HEADS if quick else heads:
            for name, profile in profiles(quick, DATASETS).items():
                drawn = draw_lengths(*profile, GPU_PAIRS if on_gpu else PAIRS, 0, spread=SPREAD, bounds=BOUNDS)
                pairs = tuple((chosen, rejected) for _, chosen, rejected in drawn)
                work = LossWorkload(pairs, v, d, trainable, dtype)
                kind = "trainable" if trainable else "frozen"
                title = f"{name}, N {work.head.n:,}, V {v:,}, D {d:,}, {kind}"
                sides = tuple(Side(peer, "benchmarks.sides.losses:LossStep", work, {"peer": peer}) for peer in LOSSES)
                cases.append(Case(title, kind, sides, {"dtype": dtype}))
    return cases


SUITE = Suite(
    name="loss",
    title="DPO loss of pairs from hidden states: loss and gradients",
    truth="benchmarks.sides.losses:ExactLoss",
    cases=build_cases,
    rounds=3,
    share_process_on_gpu=True,
    descriptions=DESCRIPTIONS,
)
