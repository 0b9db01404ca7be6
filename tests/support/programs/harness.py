"""Runs a program that trains, as it is and by `fastdpo run`, and compares the two.

The programs are the real ones, started by their own commands. They are compared by what they write:
the logs of `trainer_state.json`, the weights, and the line of `fastdpo run` that counts calls.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from tests.support import ROOT
from tests.support.comparison import Difference, differences_of_logs, largest
from tests.support.documents import trained
from tests.support.programs.warm import run_program

BIN = Path(sys.executable).parent
TIMES = re.compile(r"runtime|per_second|speed|time|memory|percentage")
"""Logged numbers that depend on the machine."""
UNITS = 8
"""How many tolerances of a single step the logs of a few steps may differ by."""
SHORT = 60.0
"""In nats, the largest summed log-probability that these tolerances are made for."""


class Run(NamedTuple):
    """One training of a program.

    Attributes:
        logs: the numbers of each log, without times.
        weights: the saved weights by their names.
        calls: number of calls by (trainer, kind, path), such as ("trl.DPOTrainer", "policy",
            "fused").
        seconds: per training step, of all steps together. None if the program does not say.
        stderr: of the program.
    """

    logs: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    calls: dict[tuple[str, str, str], int]
    seconds: float | None
    stderr: str


def run(
    command: Sequence[object],
    output: Path,
    *,
    fused: bool,
    warm: bool = False,
    threads: int = 1,
    timeout: float = 900,
    **variables: str,
) -> Run:
    """Runs a console command of this environment that trains.

    Args:
        command: the command and its arguments.
        output: the directory that it writes its state and its weights to.
        fused: whether `fastdpo run` runs it.
        warm: start it in a fork of a process that has imported TRL. Those that it starts are new.
        threads: of the CPU.
        timeout: in seconds.
        variables: of the environment.
    """
    name, *arguments = map(str, command)
    program = ["-m", "fastdpo", "run", name] if fused else [str(BIN / name)]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment |= variables
    if warm:
        done = run_program(*program, *arguments, env=environment)
    else:
        done = subprocess.run(
            [*([sys.executable] if fused else []), *program, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    printed = done.stdout + done.stderr
    states = [json.loads(path.read_text()) for path in output.rglob("trainer_state.json")]
    state = max(states, key=lambda state: state["global_step"])
    runtime = re.search(r"['\"]?train_runtime['\"]?\s*[:=]\s*['\"]?([\d.]+)", printed)
    seconds = float(runtime[1]) / state["global_step"] if runtime else None
    found = calls(done.stderr)
    for trainer, kind, path in found:
        if (kind, path) == ("policy", "fused"):
            trained.add(trainer, version(trained.distribution_of(trainer)))
    return Run(list(map(numbers, state["log_history"])), weights(output), found, seconds, done.stderr)


def run_both(
    make_command: Callable[[Path], Sequence[object]], directory: Path, rounds: int = 1, **options
) -> tuple[Run, Run]:
    """The stock and the fused training of a program.

    Args:
        make_command: makes the command that writes to a directory.
        directory: for the outputs, whose last parts are "stock" and "fused".
        rounds: how often to run both, in turns. The times are medians; the rest is that of the
            first round.
        options: of `run`.
    """
    runs: dict[str, list[Run]] = {"stock": [], "fused": []}
    for i in range(rounds):
        for name in runs:
            output = (directory / f"round{i}" if i else directory) / name
            output.parent.mkdir(exist_ok=True)
            runs[name].append(run(make_command(output), output, fused=name == "fused", **options))
    stock, fused = (of_side[0]._replace(seconds=_median_seconds(of_side)) for of_side in runs.values())
    assert not stock.calls
    return stock, fused


def _median_seconds(runs: list[Run]) -> float | None:
    seconds = [run.seconds for run in runs if run.seconds is not None]
    return median(seconds) if seconds else None


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def numbers(log: dict) -> dict[str, float]:
    """The numbers of a log that do not depend on the machine. Some programs log them as text."""

    def number(x: object) -> float | None:
        try:
            return float(x)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError):
            return None

    values = {name: number(x) for name, x in log.items() if not TIMES.search(name)}
    return {name: x for name, x in values.items() if x is not None}


def weights(output: Path) -> dict[str, torch.Tensor]:
    """The weights that a program saved last: those of a model, or those of an adapter."""
    files = [*output.rglob("model*.safetensors"), *output.rglob("adapter_model.safetensors")]
    newest = max(files, key=lambda path: path.stat().st_mtime_ns).parent
    return {name: x for path in sorted(newest.glob("*model*.safetensors")) for name, x in load_file(path).items()}


def calls(stderr: str) -> dict[tuple[str, str, str], int]:
    """The numbers of calls that `fastdpo run` prints at the end."""
    found = {}
    for trainer, counts in re.findall(r"fastdpo: (\S+) calls: ([^;\n]*)", stderr):
        for kind, path, count in re.findall(r"([\w ]+?) (\w+) (\d+)(?:, |$)", counts):
            found[trainer, kind, path] = int(count)
    return found


def said(stderr: str) -> list[str]:
    """What fastdpo has printed, in order, without the line of calls."""
    return [line for line in re.findall(r"fastdpo: .*", stderr) if " calls: " not in line]


def on(*trainers: str) -> list[str]:
    """The lines that say that fused trainers are on, and nothing else, in the versions that are installed."""
    return [f"fastdpo: {trainer} ({version(trained.distribution_of(trainer))}): on" for trainer in trainers]


def differences_of_weights(stock: Run, fused: Run) -> Iterator[Difference]:
    """The difference of each weight, relative to its norm."""
    assert stock.weights.keys() == fused.weights.keys()
    for name, a in stock.weights.items():
        norm, error = a.double().norm().item(), (a.double() - fused.weights[name].double()).norm().item()
        yield Difference(error / norm if norm else error, f"{name}, of norm {norm}, differs by {error}")


def assert_same(stock: Run, fused: Run, *, units: float = UNITS, relative_weights: float = 5e-6) -> None:
    """Asserts that all logged numbers and all final weights agree up to rounding.

    The tolerances are those of short rows. Of rows whose summed log-probabilities are larger, they
    grow with these sums, since that is how the rounding errors of their differences grow.
    """
    assert any(log.get("grad_norm", 0) > 0 for log in stock.logs), f"nothing was trained: {stock.logs}"
    sums = (abs(x) for log in stock.logs for name, x in log.items() if "logps" in name)
    scale = max(1.0, max(sums, default=0.0) / SHORT)
    log = largest(differences_of_logs(stock.logs, fused.logs))
    assert log.size <= units * scale, f"{log.description}: {log.size:.3g} units"
    weight = largest(differences_of_weights(stock, fused))
    assert weight.size <= relative_weights * scale, weight.description


def largest_difference(stock: Run, fused: Run) -> float:
    """The largest difference of a logged number, relative to the larger of its size and 1, or of a
    weight, relative to its norm.
    """
    logs = zip(stock.logs, fused.logs, strict=True)
    relative = [abs(a[name] - b[name]) / max(1.0, abs(a[name])) for a, b in logs for name in a]
    return max(*relative, largest(differences_of_weights(stock, fused)).size)


def row(program: str, distribution: str, command: str, stock: Run, fused: Run) -> dict[str, object]:
    """A row of the table of programs."""
    counts = {f"{kind} {path}": n for (_, kind, path), n in fused.calls.items()}
    return {
        "program": program,
        "version": version(distribution),
        "trl": version("trl"),
        "command": command,
        "calls": counts,
        "difference": largest_difference(stock, fused),
        "seconds": {"stock": stock.seconds, "fused": fused.seconds},
    }
