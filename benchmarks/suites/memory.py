"""Peak extra memory of a head and of a step as they grow, and what the knob `memory_budget` does to it."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import SUBJECT, Case, Checkable, Side, Suite
from benchmarks.sides.heads import HeadWorkload
from benchmarks.sides.workload import ModelSize, Workload
from benchmarks.suites.step import LABELLED, QUICK_SIZE, STOCK
from benchmarks.summary import Reading, peaks

HEAD, TRAINER, TRUTH = (
    "benchmarks.sides.heads:HeadStep",
    "benchmarks.sides.trainer:TrainerStep",
    "benchmarks.suites.memory:truth",
)
HEAD_PEERS = {"plain PyTorch": "plain PyTorch", "TRL": "TRL", SUBJECT: "fastdpo"}
STEP_MODES = {STOCK: "stock", LABELLED: "labelled", SUBJECT: "fastdpo"}
BUDGETS = 0, 128, 256, 512  # MiB; the last is the default
QUICK_BUDGETS = 0, 192  # a tile of logits may take 128 MiB anyway
PAIR = (192, 96, 96)
MIB = 1 << 20


def truth(workload: HeadWorkload | Workload) -> Checkable:
    """By the kind of workload."""
    from benchmarks.sides.exact import ExactStep
    from benchmarks.sides.heads import ExactHead

    return ExactHead(workload) if isinstance(workload, HeadWorkload) else ExactStep(workload)


def budget_name(mib: int) -> str:
    return f"{mib} MiB"


def cases(quick: bool) -> list[Case]:
    vocabulary, hidden, rows = (4096, 8, (512, 2048)) if quick else (32_000, 256, (512, 2048, 8192))
    pairs = (2,) if quick else (2, 6, 12)
    budgets = QUICK_BUDGETS if quick else BUDGETS
    knob_rows = budgets[-1] * MIB // (4 * vocabulary)  # whose gradient tiles just fit

    found = []
    for n in rows:
        work = HeadWorkload(n, vocabulary, hidden, trainable=True)
        sides = tuple(Side(name, HEAD, work, {"peer": peer}) for name, peer in HEAD_PEERS.items())
        found.append(Case(f"head/{n}", "head", sides, {"x": n, "x_name": "scored tokens N"}))
    for n in pairs:
        work = Workload(((PAIR,) * n,), size=QUICK_SIZE if quick else ModelSize())
        sides = tuple(Side(name, TRAINER, work, {"mode": mode}) for name, mode in STEP_MODES.items())
        found.append(Case(f"step/{n}", "step", sides, {"x": n, "x_name": "pairs a batch"}))
    work = HeadWorkload(knob_rows, vocabulary, hidden, trainable=True)
    sides = tuple(
        Side(budget_name(mib), HEAD, work, {"peer": "fastdpo", "memory_budget": mib * MIB}) for mib in budgets
    )
    found.append(Case("knob/head", "knob", sides))
    if not quick:
        work = Workload(((PAIR,) * pairs[-1],))
        sides = tuple(
            Side(budget_name(mib), TRAINER, work, {"mode": "fastdpo", "memory_budget": mib * MIB}) for mib in budgets
        )
        found.append(Case("knob/step", "knob", sides))
    return found


def conclude(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the knob moves the peak: at least half of what it lets the head keep must show in it."""
    claims = []
    for case in found:
        if case["group"] != "knob":
            continue
        readings: list[Reading] = sorted(peaks(case), key=lambda reading: reading.options["memory_budget"])
        if len(readings) < 2:
            continue
        first, last = readings[0], readings[-1]
        moved = last.bytes - first.bytes
        kept = min(last.options["memory_budget"] - first.options["memory_budget"], _tiles(case["workload"]))
        claims.append(
            {
                "claim": f"{case['name']}: keeping {kept // MIB} MiB more raises the peak by half of that at least",
                "value": moved,
                "unit": "bytes",
                "holds": moved >= kept / 2,
            }
        )
    return {"claims": claims}


def _tiles(workload: dict[str, Any]) -> int:
    """Bytes of the gradient tiles that there are to keep."""
    if "n" in workload:
        return 4 * workload["n"] * workload["v"]
    scored = sum(chosen + rejected for _, chosen, rejected in workload["batches"][0])
    return 4 * scored * workload["size"]["vocabulary"]


SUITE = Suite(
    name="memory",
    title="Peak memory above the loaded model",
    truth=TRUTH,
    cases=cases,
    rounds=3,
    conclude=conclude,
)
