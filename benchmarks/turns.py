"""Runs a case: first all sides are checked, then those that are equal take turns, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import Progress

from benchmarks.cases import Arrays, Case, Side, Suite, Unavailable
from benchmarks.equality import describe, judge
from benchmarks.worker import Failed, Guest, Worker

MEASURED, NOT_EQUAL, FAILED, UNAVAILABLE = "measured", "not equal", "failed", "not runnable here"


class Turns:
    """A case while it runs. Sides that are not equal, fail or can't run drop out, and stay without any sample."""

    def __init__(self, suite: Suite, case: Case, rounds: int, threads: int, progress: Progress) -> None:
        self.suite, self.case, self.rounds, self.threads, self.progress = suite, case, rounds, threads, progress
        self.bar = progress.add_task(case.name, total=None)
        self.workers: dict[str, Worker | Guest] = {}
        self.batches = 1
        self.on_gpu = torch.cuda.is_available()
        self.hold = Guest if suite.together and self.on_gpu else Worker
        self.records: dict[str, dict[str, Any]] = {
            side.name: {"status": MEASURED, "reason": None, "compared": side.compared, "options": side.options}
            for side in case.sides
        }

    def run(self) -> dict[str, Any]:
        """The case as it goes to the JSON."""
        try:
            truths = self._truths()
            # Processes that share a GPU would each hold its memory: there one comes after another.
            alone = self.on_gpu and not self.suite.together
            for sides in [[side] for side in self.case.sides] if alone else [self.case.sides]:
                self._build(sides)
                for side in sides:
                    self._check(side, truths)
                self._measure()
                self._close()
        finally:
            self._close()
            self.progress.remove_task(self.bar)
        workloads = {side.name: dataclasses.asdict(side.workload) for side in self.case.sides}
        alike = len({side.workload for side in self.case.sides}) == 1
        return {
            "name": self.case.name,
            "group": self.case.group,
            "facts": self.case.facts,
            "workload": next(iter(workloads.values())) if alike else workloads,
            "sides": self.records,
        }

    def _truths(self) -> dict[Any, Arrays]:
        """One for each workload, in a process that ends before the sides' begin."""
        truths = {}
        for workload in dict.fromkeys(side.workload for side in self.case.sides if side.compared):
            self._say("computing the truth")
            worker = self.hold(self.suite.truth, workload, {}, self.threads)
            try:
                worker.ready()
                truths[workload] = worker.ask("check")
            finally:
                worker.close()
        return truths

    def _build(self, sides: Sequence[Side]) -> None:
        self._say("loading")
        for side in sides:
            self.workers[side.name] = self.hold(side.build, side.workload, side.options, self.threads)
        for side in sides:
            batches = self._try(side.name, lambda worker: worker.ready())
            self.batches = batches or self.batches

    def _check(self, side: Side, truths: dict[Any, Arrays]) -> None:
        self._say(f"checking {side.name}")
        found = self._try(side.name, lambda worker: worker.ask("check"))
        if found is None or not side.compared:
            return
        checks = judge(found, truths[side.workload])
        self.records[side.name]["checks"] = checks
        if not all(check["equal"] for check in checks):
            self._drop(side.name, NOT_EQUAL, describe(checks))

    def _measure(self) -> None:
        self._say("measuring", total=self.rounds * self.batches)
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in self.workers}
        for turn in range(self.rounds * self.batches):
            names = list(self.workers)
            first = turn % max(len(names), 1)
            for name in names[first:] + names[:first]:
                sample = self._try(name, lambda worker, turn=turn: worker.ask("step", turn % self.batches))
                if sample is not None:
                    samples[name].append(sample)
            self.progress.advance(self.bar)
        for name in list(self.workers):
            facts = self._try(name, lambda worker: worker.ask("facts"))
            if facts is not None:
                self.records[name] |= {"facts": facts, "samples": samples[name]}

    def _close(self) -> None:
        while self.workers:
            self.workers.popitem()[1].close()

    def _try(self, name: str, question: Any) -> Any:
        """The answer of a side that is still in; None, and it drops out, if there is none."""
        if name not in self.workers:
            return None
        try:
            return question(self.workers[name])
        except Unavailable as reason:
            self._drop(name, UNAVAILABLE, str(reason))
        except Failed as reason:
            self._drop(name, FAILED, str(reason))
        return None

    def _drop(self, name: str, status: str, reason: str) -> None:
        self.workers.pop(name).close()
        self.records[name] |= {"status": status, "reason": reason}

    def _say(self, what: str, total: int | None = None) -> None:
        self.progress.update(self.bar, description=f"{self.case.name}: {what}", total=total, completed=0)
