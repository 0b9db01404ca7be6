"""What the first step of a training waits for, with cold and with warm caches, next to TRL's.

    python -m benchmarks.first_step [--json out/first_step.json] [--quick]

Each side makes its first steps in a process of its own, with empty caches of Triton and of fastdpo, and again in
another process with the caches of the first. The time of a part does not contain that of the parts within it. On a CPU,
nothing is compiled, tried on small cases or timed: what remains is the probe of the model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import machine
from benchmarks.cases import SUBJECT
from benchmarks.run import PACKAGES
from benchmarks.suites.step import GPU_SIZE, SHORT, STOCK, gpu_workload, profiles, workload
from fastdpo.commands.check.meters import now

UNTUNED = "fastdpo, FASTDPO_TUNE=0"
SIDES = {STOCK: ("stock", {}), SUBJECT: ("fastdpo", {}), UNTUNED: ("fastdpo", {"FASTDPO_TUNE": "0"})}
COMPILING, SMALL_CASES, TUNING, PROBE, REST = (
    "compiling",
    "small cases",
    "timing candidates",
    "probe",
    "everything else",
)
PARTS = (COMPILING, SMALL_CASES, TUNING, PROBE, REST)
CACHES = "TRITON_CACHE_DIR", "FASTDPO_KERNEL_CACHE"


class Clock:
    """Adds up the seconds of functions while it is on, each without those of the others that it calls."""

    def __init__(self) -> None:
        self.is_on = True
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inner = [0.0]  # of each call that is running, the seconds of those within it

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return function(*args, **kwargs)
            self.calls[part] += 1
            self._inner.append(0.0)
            start = now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = now() - start
                self.seconds[part] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return run

    def watch(self, part: str, module: Any, name: str) -> None:
        setattr(module, name, self.timed(part, getattr(module, name)))


def watched() -> Clock:
    """A clock of whatever a first step waits for."""
    from fastdpo.models.examine import probe
    from fastdpo.ops.attention import routes
    from fastdpo.ops.choice import tuning, verdicts

    clock = Clock()
    if torch.cuda.is_available():
        import triton

        clock.watch(COMPILING, triton.compiler, "compile")  # which reads what the cache has
    for part, module, name in (
        (SMALL_CASES, verdicts, "outcome"),
        (SMALL_CASES, routes, "outcome"),
        (TUNING, tuning, "_measured"),
        *((PROBE, probe, name) for name in ("probe", "head_difference")),
    ):
        clock.watch(part, module, name)
    return clock


def measure(mode: str, quick: bool, threads: int) -> dict[str, Any]:
    """Runs in a process of its own: the first step by its parts, the next ones, and what those compile."""
    from benchmarks.sides.trainer import TrainerStep

    torch.set_num_threads(threads)
    lengths = profiles(quick, SHORT)
    if torch.cuda.is_available():
        work = gpu_workload(GPU_SIZE, lengths, quick)
    else:
        work = workload(next(iter(lengths.values())), quick, batches=3)
    clock = watched()
    side = TrainerStep(work, mode)
    first = clock.timed(REST, side.step)
    before = now()
    first(0)
    seconds, of_parts, calls = now() - before, dict(clock.seconds), dict(clock.calls)
    later = []
    for batch in [0, *range(side.batches)]:
        side.reset()
        before = now()
        side.step(batch)
        later.append(now() - before)
    compiled = clock.calls[COMPILING] - calls.get(COMPILING, 0)
    return {"seconds": seconds, "parts": of_parts, "calls": calls, "later_seconds": later, "compiled_later": compiled}


def in_new_process(run: Callable[[], dict[str, Any]], variables: dict[str, str]) -> dict[str, Any]:
    kept = dict(os.environ)
    os.environ.update(variables)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(run)
    finally:
        os.environ.clear()
        os.environ.update(kept)


def table(result: dict[str, Any]) -> str:
    rows = [
        [name, x["seconds"], *(x["parts"].get(part, 0.0) for part in PARTS), min(x["later_seconds"])]
        for name, x in result["cases"].items()
    ]
    return tabulate(rows, ["seconds", "first step", *PARTS, "a later one"], tablefmt="github", floatfmt=".2f")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("out/first_step.json"), help="written after each case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    args = parser.parse_args(argv)
    result: dict[str, Any] = {
        **machine.origin(*PACKAGES),
        "quick": args.quick,
        "cases": {},
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for side, (mode, variables) in SIDES.items():
        with TemporaryDirectory() as caches:
            kept = {name: f"{caches}/{name}" for name in CACHES}
            for state in ("cold", "warm"):
                run = partial(measure, mode, args.quick, args.threads)
                result["cases"][f"{side}, {state}"] = in_new_process(run, kept | variables)
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
