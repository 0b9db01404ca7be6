"""Peak memory of a head and of a step by size."""

from __future__ import annotations

from benchmarks.cases import SUBJECT, Case, Checkable, Side, Suite
from benchmarks.sides.heads import DESCRIPTIONS as HEAD_DESCRIPTIONS
from benchmarks.sides.heads import HeadWorkload
from benchmarks.sides.workload import ModelSize, Workload
from benchmarks.suites.step import DESCRIPTIONS, LABELLED, QUICK_SIZE, STOCK, TRAINER, stock_side, without_and_with

HEAD, TRUTH = "benchmarks.sides.heads:HeadStep", "benchmarks.suites.memory:truth"
HEAD_PEERS = "plain PyTorch", "TRL", SUBJECT
PAIR = (192, 96, 96)


def truth(workload: HeadWorkload | Workload) -> Checkable:
    """The ground truth of a head or of a step."""
    from benchmarks.sides.exact import ExactStep
    from benchmarks.sides.heads import ExactHead

    return ExactHead(workload) if isinstance(workload, HeadWorkload) else ExactStep(workload)


def build_cases(quick: bool) -> list[Case]:
    vocabulary, hidden, rows = (4096, 8, (512, 2048)) if quick else (32_000, 256, (512, 2048, 8192))
    pairs = (2,) if quick else (2, 6, 12)
    cases = []
    for n in rows:
        work = HeadWorkload(n, vocabulary, hidden, trainable=True)
        sides = tuple(Side(peer, HEAD, work, {"peer": peer}) for peer in HEAD_PEERS)
        cases.append(Case(f"head/{n}", "head", sides))
    for n in pairs:
        work = Workload(((PAIR,) * n,), size=QUICK_SIZE if quick else ModelSize())
        cases.append(Case(f"step/{n}", "step", (stock_side(work), *without_and_with(TRAINER, work))))
    return cases


SUITE = Suite(
    name="memory",
    title="Peak memory above the loaded model: of a head by its scored tokens, of a step by its pairs",
    truth=TRUTH,
    cases=build_cases,
    rounds=3,
    descriptions={
        "plain PyTorch": HEAD_DESCRIPTIONS["plain PyTorch"],
        "TRL": HEAD_DESCRIPTIONS["TRL"],
        STOCK: DESCRIPTIONS[STOCK],
        LABELLED: DESCRIPTIONS[LABELLED],
        SUBJECT: "`fastdpo.ops.linear_logps`, or the trainer after `fastdpo.patch()`.",
    },
)
