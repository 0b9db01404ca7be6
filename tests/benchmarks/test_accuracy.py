"""fastdpo's summed log-probs are the most accurate."""

import json

from benchmarks import accuracy


def test_fastdpo_has_the_smallest_error_in_summed_log_probs():
    for regime in json.loads(accuracy.RESULT.read_text())["regimes"].values():
        errors = {name: e["summed log-probs"] for name, e in regime["errors"].items() if "unavailable" not in e}
        assert errors.pop("fastdpo") <= min(errors.values())
