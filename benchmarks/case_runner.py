"""Runs a case: checks its sides, then times the correct ones in turn, step by step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from rich.progress import Progress

from benchmarks.cases import Arrays, Case, Side, Suite, Unavailable
from benchmarks.equality import compare_to_truth, describe_failures
from benchmarks.machine import on_gpu
from benchmarks.worker import InProcessWorker, OutOfMemory, OutOfTime, Worker, WorkerError

MEASURED, INCORRECT, FAILED, UNAVAILABLE = "measured", "incorrect", "failed", "unavailable"
OUT_OF_MEMORY, OUT_OF_TIME = "out of memory", "out of time"
"""The status of a side. One that is out of memory is a result: it says what the side needs, next to the weights of the
others if they take turns.
"""
ERRORS = {INCORRECT, FAILED, OUT_OF_TIME}


class CaseRunner:
    """One run of a case.

    A side that is incorrect, fails, runs out of memory or is unavailable is dropped and gets no samples, as is one that
    is not checked in time. Those that are have one pass over the batches at least.

    Args:
        suite: the suite of the case.
        case: what to run.
        rounds: number of passes over the batches.
        threads: number of threads of each side.
        progress: shows what is being done.
        end: the time of `time.monotonic` at which sides must be checked, and after which no further pass begins.
        one_by_one: whether to finish each side before the next one is loaded. Sides in turn meet the same speed of
            a host, which varies by a third within seconds on some machines, but all their weights are in memory.
    """

    def __init__(
        self,
        suite: Suite,
        case: Case,
        rounds: int,
        threads: int,
        progress: Progress,
        end: float = float("inf"),
        one_by_one: bool = False,
    ) -> None:
        self.suite, self.case, self.rounds, self.threads, self.progress = suite, case, rounds, threads, progress
        self.end = end
        self.task = progress.add_task(case.name, total=None)
        self.workers: dict[str, Worker | InProcessWorker] = {}
        self.batches = 1
        self.one_by_one = one_by_one
        in_process = suite.share_process_on_gpu and on_gpu()
        self.worker_class = InProcessWorker if in_process else Worker
        self.records: dict[str, dict[str, Any]] = {
            side.name: {"status": MEASURED, "reason": None, "compared": side.compared, "options": side.options}
            for side in case.sides
        }

    def run(self) -> list[dict[str, Any]]:
        """Runs the case and returns its records for the JSON: one, or one for each batch that has a name."""
        try:
            truths = self._compute_truths()
            for sides in [[side] for side in self.case.sides] if self.one_by_one else [self.case.sides]:
                self._build(sides)
                for side in sides:
                    self._check(side, truths)
                self._measure()
                self._close()
        except Unavailable as reason:  # the ground truth, and so each side
            text = f"{self.case.name}: {UNAVAILABLE}: {reason}"
            self.progress.console.print(text, style="dim", markup=False, soft_wrap=True)
            for record in self.records.values():
                record |= {"status": UNAVAILABLE, "reason": str(reason)}
        finally:
            self._close()
            self.progress.remove_task(self.task)
        workloads = {side.name: dataclasses.asdict(side.workload) for side in self.case.sides}
        all_equal = len({side.workload for side in self.case.sides}) == 1
        record = {
            "name": self.case.name,
            "group": self.case.group,
            "facts": self.case.facts,
            "workload": next(iter(workloads.values())) if all_equal else workloads,
            "sides": self.records,
        }
        return [self._of_batch(record, batch) for batch in range(len(self.case.batches))] or [record]

    def _of_batch(self, record: dict[str, Any], batch: int) -> dict[str, Any]:
        """The record of one batch. The sides were checked on all batches together, by `checks`."""
        facts = [*self.case.batches.values()][batch]
        own = {"name": self.case.names[batch], "facts": record["facts"] | facts, "batch": batch}
        sides = {}
        for name, side in record["sides"].items():
            sides[name] = side
            if "samples" in side:
                samples = [sample for sample in side["samples"] if sample["batch"] == batch]
                tokens = side["facts"]["tokens_of_batches"][batch]
                sides[name] = side | {"samples": samples, "facts": side["facts"] | {"tokens": tokens}}
        return record | own | {"sides": sides}

    def _compute_truths(self) -> dict[Any, Arrays]:
        """The ground truth of each workload. Its process ends before those of the sides begin."""
        truths = {}
        for workload in dict.fromkeys(side.workload for side in self.case.sides if side.compared):
            self._show("computing the ground truth")
            worker = self.worker_class(self.suite.truth, workload, {}, self.threads)
            try:
                worker.ready()
                truths[workload] = worker.request("check")
            finally:
                worker.close()
        return truths

    def _build(self, sides: Sequence[Side]) -> None:
        self._show("loading")
        for side in sides:
            self.workers[side.name] = self.worker_class(side.build, side.workload, side.options, self.threads)
        for side in sides:
            batches = self._try(side.name, lambda worker: worker.ready(), self.end)
            self.batches = batches or self.batches

    def _check(self, side: Side, truths: dict[Any, Arrays]) -> None:
        if side.name in self.workers:
            self._show(f"checking {side.name}")
        arrays = self._try(side.name, lambda worker: worker.request("check"), self.end)
        if arrays is None or not side.compared:
            return
        checks = compare_to_truth(arrays, truths[side.workload])
        self.records[side.name]["checks"] = checks
        if not all(check["equal"] for check in checks):
            self._drop(side.name, INCORRECT, describe_failures(checks))

    def _measure(self) -> None:
        self._show("measuring", total=self.rounds * self.batches)
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in self.workers}
        for turn in range(self.rounds * self.batches):
            if turn and turn % self.batches == 0 and time.monotonic() > self.end:
                break
            names = list(self.workers)
            first = turn % max(len(names), 1)
            for name in names[first:] + names[:first]:
                sample = self._try(name, lambda worker, turn=turn: worker.request("step", turn % self.batches))
                if sample is not None:
                    samples[name].append(sample)
            self.progress.advance(self.task)
        for name in list(self.workers):
            facts = self._try(name, lambda worker: worker.request("facts"))
            if facts is not None:
                self.records[name] |= {"facts": facts, "samples": samples[name]}

    def _close(self) -> None:
        while self.workers:
            self.workers.popitem()[1].close()

    def _try(self, name: str, function: Callable[[Worker | InProcessWorker], Any], end: float = float("inf")) -> Any:
        """The result of `function` on a side's worker, which must have it at a time of `time.monotonic`.

        None if the side was dropped, before or by this call.
        """
        if name not in self.workers:
            return None
        self.workers[name].patience = None if end == float("inf") else max(end - time.monotonic(), 0)
        try:
            return function(self.workers[name])
        except Unavailable as reason:
            status = UNAVAILABLE, str(reason)
        except OutOfMemory as reason:
            status = OUT_OF_MEMORY, str(reason)
        except OutOfTime as reason:
            status = OUT_OF_TIME, str(reason)
        except WorkerError as reason:
            status = FAILED, str(reason)
        self._drop(name, *status)  # here, where no exception holds the tensors of the side
        return None

    def _drop(self, name: str, status: str, reason: str) -> None:
        self.workers.pop(name).close()
        self.records[name] |= {"status": status, "reason": reason}
        style, text = "bold red" if status in ERRORS else "dim", f"{self.case.name}: {name}: {status}: {reason}"
        self.progress.console.print(text, style=style, markup=False, soft_wrap=True)

    def _show(self, activity: str, total: int | None = None) -> None:
        if not self.progress.console.is_terminal:  # a log has no bars
            line = f"{datetime.now():%T} {self.case.name}: {activity}"
            self.progress.console.print(line, markup=False, soft_wrap=True)
        self.progress.update(self.task, description=f"{self.case.name}: {activity}", total=total, completed=0)
