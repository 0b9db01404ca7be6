"""docs/accuracy.md is made of the committed errors."""

import json

from benchmarks import accuracy


def test_the_page_is_not_stale():
    result = json.loads(accuracy.RESULT.read_text())
    assert accuracy.PAGE.read_text() == accuracy.page(result)


def test_fastdpo_sums_the_most_accurately():
    for regime in json.loads(accuracy.RESULT.read_text())["regimes"].values():
        errors = {name: e["sum of log-probs"] for name, e in regime["errors"].items() if "unavailable" not in e}
        assert errors.pop("fastdpo") <= min(errors.values())
