"""Runs one suite: checks all sides, times the correct ones, and writes every sample to a JSON file.

    python -m benchmarks.run --suite SUITE [--json OUT] [--cases REGEX] [--rounds N] [--quick]
    [--resume] [--sides REGEX] [--seconds N]

The exit code is 1 if a side is incorrect or failed, or could not be checked in time. Such a side gets no time, nor does
one that runs out of memory, which is a result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import machine, tables
from benchmarks.case_runner import ERRORS, CaseRunner
from benchmarks.cases import Case, Suite
from benchmarks.suites import SUITES
from benchmarks.summary import summarize

PACKAGES = (
    *("torch", "transformers", "trl", "llamafactory", "fastdpo", "peft", "accelerate"),
    *("cut-cross-entropy", "liger-kernel", "quack-kernels", "bitsandbytes"),
)
QUICK_ROUNDS = 2
RESUME_FIELDS = ("suite", "machine", "versions", "quick", "rounds")
"""Fields that must be equal in a resumed run. Each case has the commit that it was measured at."""
ROOT = Path(__file__).parents[1]


def settings(threads: int) -> dict[str, Any]:
    """The settings of this run that affect speed."""
    return {
        "threads": threads,
        "bfloat16": machine.bfloat16(),
        "OMP_WAIT_POLICY": os.environ["OMP_WAIT_POLICY"],
    }


def resume(result: dict[str, Any], previous: dict[str, Any], cases: list[Case]) -> list[Case]:
    """Copies the finished cases of a previous run into `result` and returns the remaining ones."""
    for name in RESUME_FIELDS:
        if previous[name] != result[name]:
            sys.exit(f"--resume: {name} must be {previous[name]}, as in the file; got {result[name]}")
    result["command"] = f"{previous['command']} && {result['command']}"
    result["cases"] = previous["cases"]
    result["summary"] = summarize(result)
    done = {case["name"] for case in previous["cases"]}
    return [case for case in cases if not done.issuperset(case.names)]


def run(suite: Suite, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs the cases and returns the content of the JSON file, written after every case."""
    cases = [case for case in suite.cases(args.quick) if any(re.search(args.cases, name) for name in case.names)]
    cases = [replace(case, sides=tuple(x for x in case.sides if re.search(args.sides, x.name))) for case in cases]
    if not cases:
        names = ", ".join(name for case in suite.cases(args.quick) for name in case.names)
        sys.exit(f"--cases must match a case of {suite.name}: {names}; got {args.cases!r}")
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else suite.rounds)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    origin = machine.origin(*PACKAGES)
    result: dict[str, Any] = {
        "suite": suite.name,
        "title": suite.title,
        "command": shlex.join(["python", "-m", "benchmarks.run", *args.argv]),
        **origin,
        "machine": origin["machine"] | settings(args.threads),
        "quick": args.quick,
        "rounds": rounds,
        "cases": [],
    }
    if args.resume and args.json.exists():
        cases = resume(result, json.loads(args.json.read_text()), cases)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(f"suite {suite.name}", total=len(cases))
        for case in cases:
            if time.monotonic() > end:
                progress.console.print(f"{case.name}: left out, since --seconds {args.seconds:g} are over")
                continue
            records = CaseRunner(suite, case, rounds, args.threads, progress, end, args.one_by_one).run()
            result["cases"] += [{**record, "commit": result["commit"]} for record in records]
            result["summary"] = summarize(result)
            args.json.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
            progress.advance(task)
    return result


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Run one benchmark suite. Every side is checked before it is timed.",
    )
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--json", type=Path, help="output file with every sample; default: out/SUITE.json")
    parser.add_argument("--cases", default="", metavar="REGEX", help="run only cases whose name matches")
    parser.add_argument("--sides", default="", metavar="REGEX", help="run only sides whose name matches")
    parser.add_argument("--rounds", type=int, help="passes over the batches of each case; default: the suite's own")
    parser.add_argument("--threads", type=int, default=2, help="number of threads of each side; default: 2")
    of_seconds = "after so many, check no further side and begin no further case or pass over batches"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=of_seconds)
    parser.add_argument(
        "--resume", action="store_true", help="keep the cases in the JSON file and run only the missing ones"
    )
    parser.add_argument("--one-by-one", action="store_true", help="hold one side in memory at a time, without turns")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that everything runs")
    args = parser.parse_args(argv)
    args.argv = argv
    args.json = args.json or Path("out") / f"{args.suite}.json"
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    result = run(SUITES[args.suite], args, console)
    console.print(tables.table(result), markup=False, soft_wrap=True)
    console.print(f"Written: {args.json}")
    statuses = {side["status"] for case in result["cases"] for side in case["sides"].values()}
    return 1 if statuses & ERRORS else 0


if __name__ == "__main__":
    sys.exit(main())
