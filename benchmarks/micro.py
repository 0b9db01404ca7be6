"""Micro-benchmarks of the ops with pytest-benchmark, whose results join the tables of the suites.

The sides and the check against float64 are those of the suites `head` and `attention`. In contrast
to the suites, the sides run in one process, one after another, without a measurement of memory.
`benchmarks/ops` times them; `benchmarks.report` adds the saved JSON to the tables.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from benchmarks.case_runner import MEASURED
from benchmarks.cases import SUBJECT, Arrays, Case, Side, Stepper, Suite
from benchmarks.equality import compare_to_truth, describe_failures
from benchmarks.sides.attention import AttentionWorkload
from benchmarks.sides.heads import HeadWorkload
from benchmarks.suites import SUITES, attention
from benchmarks.summary import summarize
from benchmarks.worker import build_side
from fastdpo.ops.head.results import LOGGED_STATISTICS

HEAD_SHAPES = ((1024, 32_000, 256), (256, 151_936, 896))  # N scored tokens, V vocabulary, D hidden size
# Those that compute TRL's statistics. Compiled, plain PyTorch does, too, but its mean of 151,936 logits is too
# inaccurate to be timed.
HEAD_PEERS = ("plain PyTorch", "TRL", SUBJECT)
PAIRS = ((256, 128, 64),) * 6  # tokens of prompt, chosen and rejected


class IncorrectSide(AssertionError):
    """The numbers of a side differ from the ground truth. The message names the quantities."""


def head_cases() -> list[Case]:
    """Heads with TRL's statistics, in float32."""
    cases = []
    for trainable in (True, False):
        for n, v, d in HEAD_SHAPES:
            work = HeadWorkload(n, v, d, trainable, statistics=LOGGED_STATISTICS)
            sides = tuple(Side(peer, "benchmarks.sides.heads:HeadStep", work, {"peer": peer}) for peer in HEAD_PEERS)
            group = f"{'trainable' if trainable else 'frozen'}, with statistics"
            cases.append(Case(str(work), group, sides, {"dtype": work.dtype}))
    return cases


def attention_cases() -> list[Case]:
    """One batch of equal pairs, in float32."""
    work = AttentionWorkload(PAIRS, heads=8, kv_heads=2, d=64, dtype="float32")
    prompt, chosen, rejected = PAIRS[0]
    name = f"{len(PAIRS)} pairs of {prompt} + {chosen} / {rejected} tokens"
    sides = attention.sides(work, backends=())
    return [Case(name, "equal pairs", sides, {"dtype": work.dtype})]


CASES = {"head": head_cases, "attention": attention_cases}
"""The cases by suite."""


def build_checked(suite: Suite, side: Side) -> Stepper:
    """Builds a side in this process and checks its numbers.

    Raises:
        Unavailable: the side cannot run on this machine.
        IncorrectSide: its numbers differ from the ground truth.
    """
    stepper = build_side(side.build, side.workload, side.options)
    failures = describe_failures(compare_to_truth(stepper.check(), _truth(suite.truth, side.workload)))
    if failures:
        raise IncorrectSide(f"{side.name}: {failures}")
    return stepper


@functools.lru_cache(maxsize=1)
def _truth(build: str, workload: Any) -> Arrays:
    return build_side(build, workload, {}).check()


def describe(suite: Suite, case: Case, side: Side) -> dict[str, Any]:
    """Facts that pytest-benchmark saves with the times of a side, for `read`."""
    return {
        "suite": suite.name,
        "case": case.name,
        "group": case.group,
        "facts": case.facts,
        "workload": dataclasses.asdict(side.workload),
        "side": side.name,
        "options": side.options,
    }


def read(path: Path) -> dict[str, Any]:
    """Reads the JSON of pytest-benchmark.

    Returns:
        `cases`, by suite, in the format of the suites' JSON; `others`, the median seconds of
        benchmarks that belong to no suite; `machine`, `versions`, `date` and `commit` of the run.
    """
    saved = json.loads(path.read_text())
    cases: dict[str, dict[str, Any]] = {name: {} for name in CASES}
    others = {}
    for benchmark in saved["benchmarks"]:
        info = benchmark["extra_info"]
        if "suite" not in info:
            others[benchmark["group"]] = benchmark["stats"]["median"]
            continue
        new = {name: info[name] for name in ("group", "facts", "workload")}
        new |= {"name": info["case"], "sides": {}, "micro": True}
        case = cases[info["suite"]].setdefault(info["case"], new)
        case["sides"][info["side"]] = {
            "status": MEASURED,
            "reason": None,
            "compared": True,
            "options": info["options"],
            "samples": [{"batch": 0, "seconds": seconds} for seconds in benchmark["stats"]["data"]],
        }
    versions = saved["machine_info"].pop("versions")
    commit = saved["machine_info"].pop("commit", "not recorded")
    environment = {"machine": saved["machine_info"], "versions": versions, "date": saved["datetime"], "commit": commit}
    return {"cases": {name: list(of.values()) for name, of in cases.items()}, "others": others} | environment


def add_to(result: dict[str, Any], micro: dict[str, Any]) -> dict[str, Any]:
    """A suite's result with the cases of the micro-benchmarks behind its own."""
    cases = micro["cases"].get(result["suite"], [])
    summary = summarize(SUITES[result["suite"]], cases)
    joined = {name: part | summary[name] for name, part in result["summary"].items() if name in summary}
    environment = {name: micro[name] for name in ("machine", "versions", "date", "commit")} | {"cases": []}
    return result | {
        "cases": [*result["cases"], *cases],
        "summary": result["summary"] | joined,
        "micro": environment if cases else None,
    }
