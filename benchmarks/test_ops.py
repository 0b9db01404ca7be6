"""Single ops by pytest-benchmark: the sides of the suites `head`, `loss` and `attention`, in one process, one after
another. Each is checked against float64 before it is timed.

    make bench-ops [ARGS="-k 'head and fastdpo'"]
"""

import functools

import pytest

from benchmarks.cases import Arrays, Case, Side, Suite, Unavailable
from benchmarks.equality import compare_to_truth, describe_failures
from benchmarks.suites import SUITES
from benchmarks.worker import build_side

OF_OPS = "head", "loss", "attention"
ROUNDS = 5


@functools.lru_cache(1)  # the sides of a workload come one after another
def truth(suite: str, workload: object) -> Arrays:
    return build_side(SUITES[suite].truth, workload, {}).check()


def sides(suite: Suite, quick: bool) -> list:
    cases = suite.cases(quick)
    return [
        pytest.param(suite, case, x, id=f"{suite.name}: {case.name}: {x.name}") for case in cases for x in case.sides
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    quick = metafunc.config.getoption("benchmark_disable")
    found = [x for name in OF_OPS for x in sides(SUITES[name], quick)]
    metafunc.parametrize(("suite", "case", "side"), found)


def test_op(benchmark, suite: Suite, case: Case, side: Side) -> None:
    try:
        stepper = build_side(side.build, side.workload, side.options)
    except Unavailable as reason:
        pytest.skip(str(reason))
    arrays = stepper.check()
    if side.compared:
        assert not describe_failures(compare_to_truth(arrays, truth(suite.name, side.workload)))
    benchmark.group = f"{suite.name}: {case.name}"
    benchmark.pedantic(stepper.step, args=(0,), rounds=ROUNDS, warmup_rounds=1)
