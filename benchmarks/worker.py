"""What holds one side and does what it is asked, one thing at a time: a process of its own, or this one."""

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Unavailable

if TYPE_CHECKING:
    from benchmarks.peak import PeakAboveLevel

LOG_LINES = 15
PEERS = {"trl", "datasets"}  # what a machine may lack
PRELOADED = ["torch", "transformers.models.llama.modeling_llama", "peft", "trl.trainer.dpo_trainer"]

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
"""Of the workers: threads of a side that waits for its turn must not spin on the cores of the side whose turn it is."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(PRELOADED)  # read once, forked for each worker; none of them computes at import


class Failed(RuntimeError):
    """A worker that died or raised. The message is the end of what it said."""


class Worker:
    """The caller's end of a worker. It builds its side at once; `ready()` waits for that."""

    def __init__(self, build: str, workload: Any, options: dict[str, Any], threads: int) -> None:
        self._log = Path(tempfile.mkstemp(prefix="benchmark-", suffix=".log")[1])
        self._pipe, theirs = _processes.Pipe()
        arguments = (theirs, str(self._log), build, workload, options, threads)
        self._process = _processes.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> int:
        """How many batches the side has.

        Raises:
            Unavailable: the side says that it can't run here.
            Failed: it could not be built.
        """
        return self._answer()

    def ask(self, what: str, *arguments: Any) -> Any:
        """The answer to "check", "step" or "facts".

        Raises:
            Unavailable, Failed: as in `ready`.
        """
        with suppress(OSError):  # if it is dead, what it said last is still in the pipe or in the log
            self._pipe.send((what, *arguments))
        return self._answer()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.unlink(missing_ok=True)

    def _answer(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            tail = "".join(deque(self._log.open(errors="replace"), LOG_LINES)).strip()
            raise Failed(f"died with exit code {self._process.exitcode}. {tail}") from None
        if kind == "unavailable":
            raise Unavailable(value)
        if kind == "failed":
            raise Failed(value)
        return value


class Guest:
    """A side in this process, used like a `Worker`: a GPU's context takes seconds to make, so sides may share one."""

    def __init__(self, build: str, workload: Any, options: dict[str, Any], threads: int) -> None:
        self._arguments = build, workload, options

    def ready(self) -> int:
        """As `Worker.ready`."""
        with self._failing():
            self._side = _build(*self._arguments)
        return self._side.batches

    def ask(self, what: str, *arguments: Any) -> Any:
        """As `Worker.ask`."""
        from benchmarks.peak import PeakAboveLevel

        with self._failing():
            return _answer(self._side, PeakAboveLevel(), what, *arguments)

    def close(self) -> None:
        """Gives the memory back to the next side's allocations."""
        import torch

        self.__dict__.pop("_side", None)
        gc.collect()
        torch.cuda.empty_cache()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Unavailable:
            raise
        except Exception as reason:
            raise Failed("".join(traceback.format_exception_only(reason))) from None


def serve(pipe: Connection, log: str, build: str, workload: Any, options: dict[str, Any], threads: int) -> None:
    """The worker's whole life. What the side prints goes to the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    try:
        _serve(pipe, build, workload, options, threads)
    except EOFError:  # the caller has closed the pipe: done
        return
    except Unavailable as reason:
        pipe.send(("unavailable", str(reason)))
    except Exception:
        pipe.send(("failed", "".join(traceback.format_exc().splitlines(keepends=True)[-LOG_LINES:])))


def _serve(pipe: Connection, build: str, workload: Any, options: dict[str, Any], threads: int) -> None:
    import torch

    from benchmarks.peak import PeakAboveLevel

    torch.set_num_threads(threads)
    side = _build(build, workload, options)
    peak = PeakAboveLevel()
    pipe.send(("ready", side.batches))
    while True:
        what, *arguments = pipe.recv()
        pipe.send((what, _answer(side, peak, what, *arguments)))


def _build(build: str, workload: Any, options: dict[str, Any]) -> Any:
    module, _, name = build.partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as reason:
        if reason.name not in PEERS:
            raise
        raise Unavailable(f"{reason.name} is not installed") from None
    return getattr(imported, name)(workload, **options)


def _answer(side: Any, peak: PeakAboveLevel, what: str, *arguments: Any) -> Any:
    from benchmarks.demo.meters import now
    from benchmarks.machine import clock

    if what == "step":
        with peak.watched():
            start = now()
            side.step(*arguments)
            seconds = now() - start
        side.rest()
        return {"batch": arguments[0], "seconds": seconds, "peak_bytes": peak.bytes}
    if what == "check":
        return side.check()
    return side.facts() | {"level_bytes": peak.level, "memory": peak.kind} | clock()
