"""Starts the processes of one process group, and ends all of them within a time limit.

With `run_cases` the processes train one case after another. They are forks of a process that has imported
what they need, which takes longer than most cases.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.support import ROOT
from tests.support.programs import warm
from tests.support.workers.processes import PRELOADED, PROCESSES

HERE = Path(__file__).parent

PROCESSES.set_forkserver_preload([*PRELOADED, "deepspeed", "datasets", "tests.support.trl.reward"])

SECONDS_TO_START = 120
SECONDS_A_CASE = 90
SECONDS_A_COLLECTIVE = 30
"""Timeout of a collective. A rank that waits longer fails with a traceback."""

GRACE = 10.0
"""Seconds that the other ranks have to fail with a traceback after one rank has failed."""


@dataclass(frozen=True)
class Launched:
    """The outcome of a launch.

    Attributes:
        codes: exit status of each rank; negative for a signal.
        outputs: stdout and stderr of each rank.
        timed_out: whether the launch was stopped at its time limit.
    """

    codes: tuple[int, ...]
    outputs: tuple[str, ...]
    timed_out: bool

    def __str__(self) -> str:
        """Formats the outcome for the message of a failed test."""
        head = f"exit status of the ranks: {self.codes}{', stopped at the time limit' if self.timed_out else ''}"
        tails = (f"last output of rank {rank}:\n{text[-8000:]}" for rank, text in enumerate(self.outputs))
        return "\n".join((head, *tails))


def run_cases(names: Sequence[str], ranks: int, directory: Path) -> dict[str, list[dict] | Launched]:
    """Trains the named cases and returns the results of each rank by case.

    A case that some rank did not finish maps to the outcome of its launch instead, and the cases
    after it are run in new processes.
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

    No process outlives this call: all are killed with their children after `seconds`, or `GRACE`
    seconds after one of them has failed. The environment variable RENDEZVOUS names the file that
    initializes the process group.
    """
    directory.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "RENDEZVOUS": str(directory / "rendezvous"),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    logs = [directory / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = PROCESSES.Process(target=_become, args=([str(script), *arguments], own, log))
            process.start()
            processes.append(process)
        timed_out = _wait(processes, seconds)
    finally:
        for process in processes:
            if process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return Launched(tuple(p.exitcode for p in processes), tuple(log.read_text() for log in logs), timed_out)


def _become(words: list[str], environment: dict[str, str], log: Path) -> None:
    """Entry point of a rank, in a process group of its own, to kill the children as well."""
    os.setsid()
    warm.become(words, ROOT, environment, (log, log))


def _wait(processes: list[BaseProcess], seconds: float) -> bool:
    """Waits until all processes have ended, or until `GRACE` seconds after one has failed.

    Returns True if the time limit came first.
    """
    end = time.monotonic() + seconds
    failed = False
    while any(process.exitcode is None for process in processes):
        if not failed and any(process.exitcode for process in processes):
            failed, end = True, min(end, time.monotonic() + GRACE)
        if time.monotonic() > end:
            return not failed
        time.sleep(0.05)
    return False
