"""Time of a step with fastdpo by kind of work, from torch's profiler.

    python -m benchmarks.profile [--case full/HH] [--side fastdpo] [--threads 2] [--save]

The cases and sides are those of the suite `step`. Operators are classified by their inputs:
an operator on a tensor whose last dimension is the vocabulary is a pass over logits. The profiler
slows small operators down. `--save` adds the case to benchmarks/results/profile.json, from which
`python -m benchmarks.report` makes a table of docs/notes/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import profile

from benchmarks.cases import SUBJECT
from benchmarks.machine import bfloat16, commit, machine, versions
from benchmarks.suites.step import build_cases
from benchmarks.worker import build_side

RESULT = Path(__file__).parent / "results" / "profile.json"
PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"}
KINDS = (
    "matrix products of the backbone",
    "matrix products of the head",
    "attention",
    "passes over logits",
    "operators on [V, D] weights and their gradients",
    "other torch operators",
)


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile one step of a case in the suite `step`.")
    parser.add_argument("--case", default="full/HH")
    parser.add_argument("--side", default=SUBJECT)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="add the case to benchmarks/results/profile.json")
    args = parser.parse_args()
    available = {case.name: case for case in build_cases(quick=False)}
    if args.case not in available:
        parser.error(f"--case must be one of {', '.join(available)}; got {args.case}")
    sides = {side.name: side for side in available[args.case].sides}
    if args.side not in sides:
        parser.error(f"--side must be one of {', '.join(sides)}; got {args.side}")
    side = sides[args.side]

    torch.set_num_threads(args.threads)
    stepper = build_side(side.build, side.workload, side.options)
    for _ in range(2):
        stepper.step(0)
        stepper.reset()
    start = perf_counter()
    stepper.step(0)
    unprofiled = perf_counter() - start
    stepper.reset()
    with profile(record_shapes=True) as profiler:
        start = perf_counter()
        stepper.step(0)
        profiled = perf_counter() - start

    times: Counter[str] = Counter()
    for event in profiler.key_averages(group_by_input_shape=True):
        if event.key.startswith("aten::"):
            times[kind(event.key, event.input_shapes, side.workload.size.vocabulary)] += event.self_cpu_time_total / 1e6
    times["Python and time between operators"] = profiled - times.total()
    table = Table(
        "kind of work",
        "seconds",
        "share",
        title=f"{args.case}, {args.side}: {unprofiled:.2f} s per step without the profiler",
    )
    for name, seconds in times.most_common():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / profiled:.0%}")
    Console().print(table)
    if args.save:
        save(args.case, unprofiled, dict(times.most_common()))


def save(case: str, seconds: float, kinds: dict[str, float]) -> None:
    """Adds a case. Cases of other commits or machines are removed."""
    origin = {"commit": commit(), "machine": machine() | {"bfloat16": bfloat16()}, "versions": versions("torch")}
    previous = json.loads(RESULT.read_text())
    cases = previous["cases"] if all(previous[name] == origin[name] for name in origin) else {}
    result = {"date": datetime.now(UTC).isoformat(timespec="seconds")} | origin
    result["cases"] = cases | {case: {"seconds": seconds, "kinds": kinds}}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
