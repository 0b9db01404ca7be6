"""Time of a step with fastdpo by kind of work, from torch's profiler.

    python -m benchmarks.profile [--case full/HH] [--side fastdpo] [--threads 2] [--json out/profile.json]

The cases and sides are those of the suite `step`. Operators are classified by their inputs:
an operator on a tensor whose last dimension is the vocabulary is a pass over logits. On a GPU, its kernels
are classified by their names. The profiler slows small operators down. The case is added to the JSON file.
`python -m benchmarks.report` makes a table of docs/results.md of the file in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import DeviceType, ProfilerActivity, profile

from benchmarks.cases import SUBJECT
from benchmarks.machine import bfloat16, commit, machine, versions
from benchmarks.suites.step import build_cases
from benchmarks.worker import build_side
from fastdpo.commands.check.meters import now

STEPS = 10  # on a GPU
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"}
KINDS = (
    "matrix products of the backbone",
    "matrix products of the head",
    "attention",
    "passes over logits",
    "operators on [V, D] weights and their gradients",
    "other torch operators",
)
KERNELS = {  # of a GPU, by what their names match; the first that fits
    "attention": "flash|sdpa|fmha|_packed_attention",
    "gathered keys": "_gather_keys|_sum_places",
    "passes over logits": "_token_logps|_target_logits|^_(forward|backward)_kernel$",  # the last ones are TRL's
    "matrix products": "nvjet|gemm|cutlass|splitK",
}


def kind(name: str, shapes: list[Any], vocabulary: int) -> str:
    """Classifies an operator as one of `KINDS`."""
    sizes = [shape for shape in shapes if isinstance(shape, list) and shape and isinstance(shape[0], int)]
    has_vocabulary = any(vocabulary in shape for shape in sizes)
    if name in PRODUCTS:
        return KINDS[1] if has_vocabulary else KINDS[0]
    if "scaled_dot_product" in name:
        return KINDS[2]
    if any(shape[-1] == vocabulary and len(shape) > 1 for shape in sizes):
        return KINDS[3]
    return KINDS[4] if has_vocabulary else KINDS[5]


def kind_of_kernel(name: str) -> str:
    return next((kind for kind, pattern in KERNELS.items() if re.search(pattern, name)), KINDS[-1])


def profiled(stepper: Any, batch: int, vocabulary: int) -> dict[str, Any]:
    """Seconds of a step without the profiler, and with it those of each kind of work."""
    for _ in range(2):
        stepper.step(batch)
        stepper.reset()
    seconds = _seconds(stepper, batch)
    with profile(record_shapes=True) as profiler:
        with_profiler = _seconds(stepper, batch)
    times: Counter[str] = Counter()
    for event in profiler.key_averages(group_by_input_shape=True):
        if event.key.startswith("aten::"):
            times[kind(event.key, event.input_shapes, vocabulary)] += event.self_cpu_time_total / 1e6
    times["Python and time between operators"] = with_profiler - times.total()
    return {"seconds": seconds, "kinds": dict(times.most_common())}


def profiled_on_gpu(stepper: Any, batch: int) -> dict[str, Any]:
    """Seconds of a step without the profiler, and with it those of each kind of kernel, and their number."""
    for _ in range(3):
        stepper.step(batch)
        stepper.reset()
    seconds = median(_seconds(stepper, batch) for _ in range(STEPS))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _seconds(stepper, batch)
    times: Counter[str] = Counter()
    kernels = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    for event in kernels:
        times[kind_of_kernel(event.key)] += event.self_device_time_total / 1e6
    return {"seconds": seconds, "kinds": dict(times.most_common()), "kernels": sum(event.count for event in kernels)}


def _seconds(stepper: Any, batch: int) -> float:
    start = now()
    stepper.step(batch)
    seconds = now() - start
    stepper.reset()
    return seconds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Profile one step of a case in the suite `step`.")
    parser.add_argument("--case", default="full/HH")
    parser.add_argument("--side", default=SUBJECT)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("out/profile.json"), help="the file that gets the case")
    args = parser.parse_args(argv)
    available = {name: (case, batch) for case in build_cases(False) for batch, name in enumerate(case.names)}
    if args.case not in available:
        parser.error(f"--case must be one of {', '.join(available)}; got {args.case}")
    case, batch = available[args.case]
    sides = {side.name: side for side in case.sides}
    if args.side not in sides:
        parser.error(f"--side must be one of {', '.join(sides)}; got {args.side}")
    side = sides[args.side]

    torch.set_num_threads(args.threads)
    stepper = build_side(side.build, side.workload, side.options)
    on_gpu = torch.cuda.is_available()
    result = profiled_on_gpu(stepper, batch) if on_gpu else profiled(stepper, batch, side.workload.size.vocabulary)
    total = sum(result["kinds"].values())
    title = f"{args.case}, {args.side}: {result['seconds']:.3f} s per step without the profiler"
    table = Table("kind of work", "seconds", "share", title=title)
    for name, seconds in result["kinds"].items():
        table.add_row(name, f"{seconds:.4f}", f"{seconds / total:.0%}")
    console = Console()
    console.print(table)
    if on_gpu:
        console.print(f"The GPU is busy for {total:.3f} s, with {result['kernels']:,} kernels.")
    add(args.json, args.case if args.side == SUBJECT else f"{args.case}, {args.side}", result)


def add(path: Path, name: str, result: dict[str, Any]) -> None:
    """Adds a case to a file. Cases of other commits or machines are removed."""
    origin = {"commit": commit(), "machine": machine() | {"bfloat16": bfloat16()}, "versions": versions("torch")}
    previous = json.loads(path.read_text()) if path.exists() else {}
    cases = previous["cases"] if all(previous.get(name) == origin[name] for name in origin) else {}
    content = {"date": datetime.now(UTC).isoformat(timespec="seconds")} | origin | {"cases": cases | {name: result}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
