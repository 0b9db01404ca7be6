"""Peak memory of a head and of a step by size, and the effect of `memory_budget` on it."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import SUBJECT, Case, Checkable, Side, Suite
from benchmarks.sides.heads import DESCRIPTIONS as HEAD_DESCRIPTIONS
from benchmarks.sides.heads import HeadWorkload
from benchmarks.sides.workload import ModelSize, Workload
from benchmarks.suites.step import DESCRIPTIONS, LABELLED, QUICK_SIZE, STOCK, TRAINER
from benchmarks.summary import PeakReading, peaks

HEAD, TRUTH = "benchmarks.sides.heads:HeadStep", "benchmarks.suites.memory:truth"
HEAD_PEERS = {"plain PyTorch": "plain PyTorch", "TRL": "TRL", SUBJECT: "fastdpo"}
STEP_MODES = {STOCK: "stock", LABELLED: "labelled", SUBJECT: "fastdpo"}
BUDGETS = 0, 128, 256, 512  # MiB; the last is the default
QUICK_BUDGETS = 0, 192  # one tile of logits may take 128 MiB in any case
PAIR = (192, 96, 96)
MIB = 1 << 20


def truth(workload: HeadWorkload | Workload) -> Checkable:
    """The ground truth of a head or of a step."""
    from benchmarks.sides.exact import ExactStep
    from benchmarks.sides.heads import ExactHead

    return ExactHead(workload) if isinstance(workload, HeadWorkload) else ExactStep(workload)


def budget_name(mib: int) -> str:
    return f"{mib} MiB"


def build_cases(quick: bool) -> list[Case]:
    vocabulary, hidden, rows = (4096, 8, (512, 2048)) if quick else (32_000, 256, (512, 2048, 8192))
    pairs = (2,) if quick else (2, 6, 12)
    budgets = QUICK_BUDGETS if quick else BUDGETS
    budget_rows = budgets[-1] * MIB // (4 * vocabulary)  # their gradient tiles just fit into the largest budget

    cases = []
    for n in rows:
        work = HeadWorkload(n, vocabulary, hidden, trainable=True)
        sides = tuple(Side(name, HEAD, work, {"peer": peer}) for name, peer in HEAD_PEERS.items())
        cases.append(Case(f"head/{n}", "head", sides, {"x": n, "x_name": "scored tokens N"}))
    for n in pairs:
        work = Workload(((PAIR,) * n,), size=QUICK_SIZE if quick else ModelSize())
        sides = tuple(Side(name, TRAINER, work, {"mode": mode}) for name, mode in STEP_MODES.items())
        cases.append(Case(f"step/{n}", "step", sides, {"x": n, "x_name": "pairs per batch"}))
    work = HeadWorkload(budget_rows, vocabulary, hidden, trainable=True)
    sides = tuple(
        Side(budget_name(mib), HEAD, work, {"peer": "fastdpo", "memory_budget": mib * MIB}) for mib in budgets
    )
    cases.append(Case("budget/head", "budget", sides))
    if not quick:
        work = Workload(((PAIR,) * pairs[-1],))
        sides = tuple(
            Side(budget_name(mib), TRAINER, work, {"mode": "fastdpo", "memory_budget": mib * MIB}) for mib in budgets
        )
        cases.append(Case("budget/step", "budget", sides))
    return cases


def budget_claims(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The claim that the peak grows by at least half of the memory that the head keeps."""
    claims = []
    for case in cases:
        if case["group"] != "budget":
            continue
        readings: list[PeakReading] = sorted(peaks(case), key=lambda reading: reading.options["memory_budget"])
        if len(readings) < 2:
            continue
        first, last = readings[0], readings[-1]
        increase = last.bytes - first.bytes
        kept = min(last.options["memory_budget"] - first.options["memory_budget"], _tile_bytes(case["workload"]))
        claims.append(
            {
                "claim": f"{case['name']}: keeping {kept // MIB} MiB more raises the peak by at least half of that",
                "value": increase,
                "unit": "bytes",
                "holds": increase >= kept / 2,
            }
        )
    return {"claims": claims}


def _tile_bytes(workload: dict[str, Any]) -> int:
    """Bytes of all gradient tiles of the head."""
    if "n" in workload:
        return 4 * workload["n"] * workload["v"]
    scored = sum(chosen + rejected for _, chosen, rejected in workload["batches"][0])
    return 4 * scored * workload["size"]["vocabulary"]


SUITE = Suite(
    name="memory",
    title="Peak memory above the loaded model",
    truth=TRUTH,
    cases=build_cases,
    rounds=3,
    extra_summary=budget_claims,
    descriptions={
        "plain PyTorch": HEAD_DESCRIPTIONS["plain PyTorch"],
        "TRL": HEAD_DESCRIPTIONS["TRL"],
        STOCK: DESCRIPTIONS[STOCK],
        LABELLED: DESCRIPTIONS[LABELLED],
        SUBJECT: "`fastdpo.ops.linear_logps`, or the trainer after `fastdpo.patch()`; with a given `memory_budget` "
        "in the last table.",
    },
)
