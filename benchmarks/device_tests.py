"""Runs the tests of the ops and of CUDA graphs on a device in several processes, which compile kernels in parallel.

    python -m benchmarks.device_tests [--device cuda] [--jobs N] [--logs DIRECTORY] [--seconds N] [PYTEST_OPTION ...]

Prints how many tests are done every few seconds, and at the end the log of each process in which a test failed, or
of a process that did not end in time the tests that failed. Each process logs the name of a test before it runs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/ops", "tests/models/test_graphs.py")
OPTIONS = ("--ignore", "tests/ops/test_preference_loss.py", "-p", "no:cacheprovider", "-v", "--color=no")
SECONDS = 10  # between two lines of progress
FINISHED = re.compile(r" (PASSED|SKIPPED|XFAIL|FAILED|ERROR)\b.*\[ *\d+%\]")
NO_TESTS = 5  # exit status of pytest, in a process to which none of a few tests falls


def start(job: int, jobs: int, device: str, log: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """Starts pytest on every `jobs`-th test."""
    # A kernel that fails is an error and not replaced, and each test runs the kernels that it expects.
    settings = {"FASTDPO_STRICT": "1", "FASTDPO_KERNEL_CACHE": "0", "FASTDPO_TUNE": "0"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        *TESTS,
        *OPTIONS,
        "--device",
        device,
        "--shard",
        f"{job}/{jobs}",
        *options,
    ]
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, stdout=output, stderr=subprocess.STDOUT)


def progress(logs: list[Path]) -> str:
    done = [result for log in logs for result in FINISHED.findall(log.read_text(errors="replace"))]
    failed = sum(result in ("FAILED", "ERROR") for result in done)
    return f"{len(done)} tests done, {failed} failed"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_tests")
    parser.add_argument("--device", default="cuda", help="as of the tests: cuda, or cpu as a stand-in")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="number of processes")
    parser.add_argument("--logs", type=Path, default=Path("out/gpu"), help="where each process writes its log")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to end what still runs")
    args, options = parser.parse_known_args(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    logs = [args.logs / f"tests-{job}.log" for job in range(args.jobs)]
    began = time.monotonic()
    processes = [start(job, args.jobs, args.device, log, options) for job, log in enumerate(logs)]
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() - began < args.seconds:
            time.sleep(min(SECONDS, 1 + (time.monotonic() - began) / 10))
            print(f"tests: {progress(logs)}, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        for process in processes:
            process.kill()
    statuses = [process.wait() for process in processes]
    for log, status in zip(logs, statuses, strict=True):
        text = log.read_text(errors="replace")
        if status < 0:
            text = "".join(line for line in text.splitlines(True) if re.search(" (FAILED|ERROR)", line))
        if status not in (0, NO_TESTS):
            print(f"{log}, exit status {status}:\n{text}")
    ran = any(status == 0 for status in statuses)
    return 0 if ran and all(status in (0, NO_TESTS) for status in statuses) else 1


if __name__ == "__main__":
    sys.exit(main())
