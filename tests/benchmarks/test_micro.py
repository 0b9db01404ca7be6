"""Micro-benchmarks are checked before they are timed, and appear in the tables of the suites."""

import json

import pytest

from benchmarks import micro, report, tables
from benchmarks.cases import SUBJECT, Case, Side
from benchmarks.sides.heads import HeadWorkload
from benchmarks.suites import SUITES
from benchmarks.summary import summarize
from fastdpo.ops.head.results import LOGGED_STATISTICS

WORK = HeadWorkload(n=64, v=500, d=16, trainable=True, statistics=LOGGED_STATISTICS)
SIDES = tuple(Side(peer, "benchmarks.sides.heads:HeadStep", WORK, {"peer": peer}) for peer in micro.HEAD_PEERS)


@pytest.mark.parametrize("side", SIDES, ids=lambda side: side.name)
def test_a_head_with_statistics_is_checked(side):
    step = micro.build_checked(SUITES["head"], side)
    quantities = ("log-probs", "entropy", "mean logit", "top-1 accuracy", "gradient of hidden states")
    assert tuple(step.check()) == (*quantities, "gradient of the weight")


def test_a_faulty_side_is_not_timed(monkeypatch, request):
    monkeypatch.syspath_prepend(request.path.parent)
    with pytest.raises(micro.IncorrectSide, match="Wrong: gradient of hidden states: error"):
        micro.build_checked(SUITES["head"], Side("Wrong", "sabotaged:Wrong", WORK))


def benchmark(case: Case, side: Side, seconds: float) -> dict:
    stats = {"median": seconds, "data": [seconds, seconds]}
    return {"group": "a group", "extra_info": micro.describe(SUITES["head"], case, side), "stats": stats}


def test_saved_times_are_added_to_the_table_of_their_suite(tmp_path):
    case = Case("a micro case", "with statistics", SIDES)
    times = {"plain PyTorch": 2.0, "TRL": 6.0, SUBJECT: 0.5}
    saved = {
        "benchmarks": [
            *(benchmark(case, side, times[side.name]) for side in SIDES),
            {"group": "packing", "extra_info": {}, "stats": {"median": 0.005, "data": [0.005]}},
        ],
        "machine_info": {"cpu": "a processor", "threads": 2, "versions": {"torch": "2.13"}},
        "datetime": "2026-01-02T03:04:05",
    }
    path = tmp_path / "ops.json"
    path.write_text(json.dumps(saved))
    results = micro.read(path)
    suite = {"suite": "head", "machine": {}, "cases": [], "summary": summarize(SUITES["head"], [])}
    table = tables.table(micro.add_to(suite, results))
    assert "2.00 s, 4.00x" in table
    assert "6.00 s, 12.00x" in table
    assert "12.00x (12.00 to 12.00)" in table
    assert "5 ms" in tables.packing_table(results)


def test_committed_times_match_the_current_cases():
    saved = micro.read(report.RESULTS / report.MICRO_FILE)
    for suite, build in micro.CASES.items():
        sides = {case.name: {side.name for side in case.sides} for case in build()}
        for case in saved["cases"][suite]:
            assert case["sides"].keys() == sides[case["name"]]
