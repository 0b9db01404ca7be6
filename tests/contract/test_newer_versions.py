"""Newer versions of a trainer's package are on, unless code that a line relies on has changed. They are copies."""

import functools

import pytest

from tests.contract.harness import Case, each, harnesses
from tests.support.copies import assert_recorded, assert_reported_and_trained, train_program

OF_NEWER_VERSIONS = [x for x in harnesses() if x.newer]
COPIES = [Case(x, name, report) for x in OF_NEWER_VERSIONS for name, report in x.newer.reports.items()]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function of a harness that trains with each copy once."""
    return functools.cache(
        lambda harness: train_program(
            harness.name, harness.newer.version, harness.newer.copies, tmp_path_factory.mktemp("copies")
        )
    )


@pytest.mark.parametrize("case", COPIES, ids=lambda case: f"{case.harness.name}-{case.name}")
def test_a_copy_trains_what_its_stock_trains(case, results):
    assert_reported_and_trained(results(case.harness)[case.name], case.value)


@each(lambda harness: harness.newer)
def test_the_recorded_code_is_that_of_the_installed_version(harness):
    assert_recorded(harness.newer.recorded)
