"""One rank can read metrics or log by itself between regular logs, without the other ranks."""

import math

import pytest
from rank_comparison import assert_same, assert_trained_alike


def without_additional_logs(run: dict) -> dict:
    return {**run, "logs": [log for log in run["logs"] if "x" not in log]}


@pytest.mark.parametrize("case", ["ddp main logs"])
def test_the_main_process_logs(case, ranks):
    for rank in ranks:
        assert_same(without_additional_logs(rank["stock"]), without_additional_logs(rank["patched"]))
    stock, patched = ([log for log in ranks[0][kind]["logs"] if "x" in log] for kind in ("stock", "patched"))
    assert [log.keys() for log in stock] == [log.keys() for log in patched] != []
    assert all(math.isfinite(x) for log in patched for x in log.values())


@pytest.mark.parametrize("case", ["ddp main reads"])
def test_the_main_process_reads(case, ranks):
    assert_trained_alike(ranks)
