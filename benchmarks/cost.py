"""Compares the cost by which a budget of tokens balances batches with measured times.

    python -m benchmarks.cost [--seconds S] [--quick]

Times fastdpo's steps of the suite `step` on batches of 3 pairs at the lengths of its six datasets.
A cost predicts a time up to one factor, which is fitted to all batches. The command prints how far
the predictions are from the medians of the measured times: for `CostModel.of_model`, and for tokens
alone.
"""

from __future__ import annotations

import argparse
import sys
from time import monotonic

import numpy as np
import torch
from rich.console import Console
from tabulate import tabulate

from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import ModelSize, Workload, draw_lengths
from benchmarks.suites.step import BOUNDS, PROFILES, QUICK_SIZE, SPREAD, profiles
from fastdpo.batching import CostModel
from fastdpo.commands.check.meters import now
from fastdpo.lengths import pair_lengths

PAIRS, BATCHES_OF_DATASET = 3, 3


def workload(quick: bool) -> Workload:
    batches = [
        draw_lengths(*profile, PAIRS, seed, spread=SPREAD, bounds=BOUNDS)
        for profile in profiles(quick, PROFILES).values()
        for seed in range(BATCHES_OF_DATASET)
    ]
    return Workload(tuple(batches), size=QUICK_SIZE if quick else ModelSize())


def measure(step: TrainerStep, seconds: float) -> np.ndarray:
    """The median time of each batch, after one step of each that is not timed. At least one round."""
    times: list[list[float]] = []
    end = monotonic() + seconds
    for turn in range(sys.maxsize):
        if turn > 1 and monotonic() > end:
            break
        of_turn = []
        for batch in range(step.batches):
            start = now()
            step.step(batch)
            of_turn.append(now() - start)
            step.reset()
        times.append(of_turn)
    return np.median(times[1:], 0)


def errors(costs: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The relative errors of times that are predicted from costs by one factor."""
    factor = np.exp(np.log(times / costs).mean())
    return np.abs(factor * costs / times - 1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="time to measure; default: 40")
    parser.add_argument("--threads", type=int, default=2, help="number of threads; default: 2")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    work = workload(args.quick)
    step = TrainerStep(work, "fastdpo")
    lengths = [pair_lengths(work.examples(i), work.max_length) for i in range(len(work.batches))]
    times = measure(step, 0 if args.quick else args.seconds)
    models = {"CostModel.of_model": CostModel.of_model(step.trainer.model), "tokens alone": CostModel()}
    rows = []
    for name, model in models.items():
        error = errors(np.array([model.costs(of_batch).sum() for of_batch in lengths]), times)
        rows.append([name, f"{error.mean():.1%}", f"{error.max():.1%}"])
    console = Console(highlight=False)
    console.print(f"{len(times)} batches of {PAIRS} pairs, {times.min():.3g} to {times.max():.3g} s a step")
    console.print(tabulate(rows, ["error of", "mean", "largest"], tablefmt="github"), soft_wrap=True)


if __name__ == "__main__":
    main()
