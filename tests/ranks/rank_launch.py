"""Starts the processes of one process group, and ends all of them within a time limit.

`run_cases` has them train one case after another: starting a process takes longer than most cases.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent

SECONDS_TO_START = 120
SECONDS_A_CASE = 90
SECONDS_A_COLLECTIVE = 30
"""A rank that waits longer for the others fails, and its traceback shows where."""

GRACE = 10.0
"""Seconds that the other ranks have, once one has failed, to fail by themselves with a traceback."""


@dataclass(frozen=True)
class Launched:
    """How the processes of a launch ended.

    Attributes:
        codes: exit status of each rank; negative for a signal.
        outputs: what each rank wrote to stdout and stderr.
        timed_out: the launch ran past its limit.
    """

    codes: tuple[int, ...]
    outputs: tuple[str, ...]
    timed_out: bool

    def __str__(self) -> str:
        """For the message of a failed test."""
        head = f"exit status of the ranks: {self.codes}{', stopped at the time limit' if self.timed_out else ''}"
        tails = (f"last output of rank {rank}:\n{text[-8000:]}" for rank, text in enumerate(self.outputs))
        return "\n".join((head, *tails))


def run_cases(names: Sequence[str], ranks: int, directory: Path) -> dict[str, list[dict] | Launched]:
    """Results of each rank in each case; of a case that some rank did not finish, how the launch ended.

    The cases after such a one are run in new processes.
    """
    done: dict[str, list[dict] | Launched] = {}
    left = list(names)
    while left:
        seconds = SECONDS_TO_START + SECONDS_A_CASE * len(left)
        logs = directory / f"launch with {left[0]}"
        launched = launch(HERE / "rank_worker.py", [str(directory), *left], ranks, seconds, logs)
        for name in left:
            files = [result(directory, name, rank) for rank in range(ranks)]
            if not all(file.exists() for file in files):
                done[name] = launched
                break
            done[name] = [torch.load(file, weights_only=False) for file in files]
        left = [name for name in names if name not in done]
    return done


def result(directory: Path, name: str, rank: int) -> Path:
    return directory / name / f"rank{rank}.pt"


def launch(script: Path, arguments: Sequence[str], ranks: int, seconds: float, directory: Path) -> Launched:
    """Runs `python script *arguments` once for each rank.

    No process outlives this call: all are killed, with their children, when `seconds` have passed, or `GRACE` seconds
    after one of them has failed. Ranks meet through the file named by the environment variable RENDEZVOUS.
    """
    directory.mkdir(parents=True)
    paths = [str(HERE), str(HERE.parent / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(directory / "datasets"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "RENDEZVOUS": str(directory / "rendezvous"),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    logs = [directory / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                process = subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a process group of its own, which can be killed whole
                )
            processes.append(process)
        timed_out = _wait(processes, seconds)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Launched(tuple(p.returncode for p in processes), tuple(log.read_text() for log in logs), timed_out)


def _wait(processes: list[subprocess.Popen], seconds: float) -> bool:
    """Until all have ended, or one has failed and the others had their time. True if the limit came first."""
    end = time.monotonic() + seconds
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
            failed, end = True, min(end, time.monotonic() + GRACE)
        if time.monotonic() > end:
            return not failed
        time.sleep(0.05)
    return False
