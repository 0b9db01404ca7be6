"""Times the sides of `benchmarks.micro` and saves machine and versions with the results."""

import re

import pytest

from benchmarks import micro
from benchmarks.cases import Case, Side, Unavailable
from benchmarks.machine import bfloat16, commit, machine, versions
from benchmarks.suites import SUITES


@pytest.fixture
def time_side(benchmark):
    """A function that checks a side against float64 and then times it.

    An unavailable side is skipped.
    """

    def time(suite_name: str, case: Case, side: Side, rounds: int) -> None:
        suite = SUITES[suite_name]
        try:
            stepper = micro.build_checked(suite, side)
        except Unavailable as reason:
            pytest.skip(str(reason))
        benchmark.group = f"{suite_name}: {case.name}"
        benchmark.extra_info.update(micro.describe(suite, case, side))
        benchmark.pedantic(stepper.step, args=(0,), rounds=rounds, warmup_rounds=1)

    return time


def parameters(cases: list[Case]) -> list:
    """One parameter per side of each case. An id: "N_1024_V_32000_D_256_frozen_statistics-TRL"."""

    def identifier(name: str) -> str:
        return re.sub(r"\W+", "_", name.replace(",", ""))

    return [
        pytest.param(case, side, id=f"{identifier(case.name)}-{identifier(side.name)}")
        for case in cases
        for side in case.sides
    ]


def pytest_generate_tests(metafunc):
    """Runs `test_SUITE.py` on all sides of its suite, as the arguments `case` and `side`."""
    if {"case", "side"} <= set(metafunc.fixturenames):
        suite = metafunc.module.__name__.rpartition("test_")[2]
        metafunc.parametrize(("case", "side"), parameters(micro.CASES[suite]()))


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.clear()
    own = machine() | {"bfloat16": bfloat16(), "commit": commit()}
    machine_info.update(own | {"versions": versions("torch", "transformers", "trl", "fastdpo")})


def pytest_benchmark_update_commit_info(config, commit_info):
    commit_info.clear()
