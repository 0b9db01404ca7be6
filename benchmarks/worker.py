"""Workers: each holds one side and serves requests, in a process of its own or in this one."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Unavailable

if TYPE_CHECKING:
    from benchmarks.peak import PeakAboveBaseline

LOG_LINES = 15
OPTIONAL_PACKAGES = {
    *("trl", "datasets", "llamafactory", "bitsandbytes"),
    *("cut_cross_entropy", "cutlass", "liger_kernel", "quack"),
}
"""A side that needs one of these is unavailable without it."""
TRAINER = "llamafactory.train.dpo.trainer" if find_spec("llamafactory") else "trl.trainer.dpo_trainer"
PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "peft", TRAINER]

# Threads of a side that waits for its turn must not spin on the cores of the side that is timed.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(PRELOADED)  # imported once, then forked for each worker; none computes at import


class WorkerError(RuntimeError):
    """A worker died or raised. The message is the end of its output."""


class OutOfMemory(RuntimeError):
    """The side of a worker needs more memory than there is."""


class OutOfTime(RuntimeError):
    """A worker has not answered in time."""


class Worker:
    """The caller's end of a worker process.

    The process builds its side at once; `ready()` waits until it is built.

    Attributes:
        patience: how many seconds the next response may take; None for any number. A worker that takes longer ends.
    """

    patience: float | None = None

    def __init__(self, build: str, workload: Any, options: dict[str, Any], threads: int) -> None:
        self._log = Path(tempfile.mkstemp(prefix="benchmark-", suffix=".log")[1])
        self._pipe, worker_end = _processes.Pipe()
        arguments = (worker_end, str(self._log), build, workload, options, threads)
        self._process = _processes.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        worker_end.close()

    def ready(self) -> int:
        """Waits for the side and returns its number of batches.

        Raises:
            Unavailable: the side cannot run on this machine.
            OutOfMemory: it needs more memory than there is.
            OutOfTime: it has taken longer than `patience`.
            WorkerError: the side could not be built.
        """
        return self._receive()

    def request(self, name: str, *arguments: Any) -> Any:
        """Sends the request "check", "step" or "facts" and returns the response.

        Raises:
            Unavailable, OutOfMemory, OutOfTime, WorkerError: as in `ready`.
        """
        with suppress(OSError):  # the last output of a dead process is still in the pipe or in the log
            self._pipe.send((name, *arguments))
        return self._receive()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.unlink(missing_ok=True)

    def _receive(self) -> Any:
        if not self._pipe.poll(self.patience):
            self._process.kill()
            raise OutOfTime("--seconds are over")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            tail = "".join(deque(self._log.open(errors="replace"), LOG_LINES)).strip()
            raise WorkerError(f"died with exit code {self._process.exitcode}. {tail}") from None
        if kind == "unavailable":
            raise Unavailable(value)
        if kind == "out of memory":
            raise OutOfMemory(value)
        if kind == "failed":
            raise WorkerError(value)
        return value


class InProcessWorker:
    """A side in this process, with the methods of `Worker`.

    Avoids the seconds that a GPU context takes to create. What has begun ends, however long it takes.
    """

    patience: float | None = None

    def __init__(self, build: str, workload: Any, options: dict[str, Any], threads: int) -> None:
        self._arguments = build, workload, options

    def ready(self) -> int:
        """See `Worker.ready`."""
        with self._as_worker_error():
            self._side = build_side(*self._arguments)
        return self._side.batches

    def request(self, name: str, *arguments: Any) -> Any:
        """See `Worker.request`."""
        from benchmarks.peak import PeakAboveBaseline

        with self._as_worker_error():
            return _respond(self._side, PeakAboveBaseline(), name, *arguments)

    def close(self) -> None:
        """Releases the memory of the side."""
        import torch

        self.__dict__.pop("_side", None)
        gc.collect()
        torch.cuda.empty_cache()

    @contextmanager
    def _as_worker_error(self) -> Iterator[None]:
        import torch

        if self.patience == 0:
            raise OutOfTime("--seconds are over")
        try:
            yield
        except Unavailable:
            raise
        except torch.OutOfMemoryError as reason:
            raise OutOfMemory(str(reason)) from None
        except Exception as reason:
            raise WorkerError("".join(traceback.format_exception_only(reason))) from None


def build_side(build: str, workload: Any, options: dict[str, Any]) -> Any:
    """Imports "module:callable" and calls it.

    Raises:
        Unavailable: one of `OPTIONAL_PACKAGES` is not installed, or the side cannot run on this
            machine.
    """
    module, _, name = build.partition(":")
    with optional_packages():
        return getattr(importlib.import_module(module), name)(workload, **options)


@contextmanager
def optional_packages() -> Iterator[None]:
    """Raises `Unavailable` where one of `OPTIONAL_PACKAGES` cannot be imported."""
    try:
        yield
    except ModuleNotFoundError as reason:
        package = (reason.name or "").partition(".")[0]
        if package not in OPTIONAL_PACKAGES:
            raise
        raise Unavailable(f"{package} is not installed") from None


def serve(pipe: Connection, log: str, build: str, workload: Any, options: dict[str, Any], threads: int) -> None:
    """Entry point of a worker process. Standard output and error go to the log."""
    import torch

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    try:
        with optional_packages():  # a ground truth builds its models when it is asked
            _serve_requests(pipe, build, workload, options, threads)
    except EOFError:  # the caller has closed the pipe: done
        return
    except Unavailable as reason:
        pipe.send(("unavailable", str(reason)))
    except torch.OutOfMemoryError as reason:
        pipe.send(("out of memory", str(reason)))
    except Exception:
        pipe.send(("failed", "".join(traceback.format_exc().splitlines(keepends=True)[-LOG_LINES:])))


def _serve_requests(pipe: Connection, build: str, workload: Any, options: dict[str, Any], threads: int) -> None:
    import torch

    from benchmarks.peak import PeakAboveBaseline

    torch.set_num_threads(threads)
    gc.freeze()  # each step collects garbage, which takes longer than some steps among all that is imported
    side = build_side(build, workload, options)
    peak = PeakAboveBaseline()
    response = "ready", side.batches
    on_gpu = torch.cuda.is_available()
    while True:
        if on_gpu:
            torch.cuda.empty_cache()  # the memory of a step is for the side whose turn it is
        pipe.send(response)
        name, *arguments = pipe.recv()
        if name == "step" and on_gpu:
            side.step(*arguments)  # gets that memory, before the step that is timed
            side.reset()
        response = name, _respond(side, peak, name, *arguments)


def _respond(side: Any, peak: PeakAboveBaseline, name: str, *arguments: Any) -> Any:
    from benchmarks.machine import clock
    from fastdpo.commands.check import meters

    now = getattr(side, "now", meters.now)
    if name == "step":
        with peak.watched():  # returns free memory to the system
            if getattr(side, "warms_up", False):
                side.step(*arguments)
                side.reset()
            start = now()
            side.step(*arguments)
            seconds = now() - start
        side.reset()
        return {"batch": arguments[0], "seconds": seconds, "peak_bytes": peak.bytes}
    if name == "check":
        return side.check()
    return side.facts() | {"baseline_bytes": peak.baseline, "memory": peak.kind} | clock()
