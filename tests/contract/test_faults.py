"""The comparison of a trainer with stock can fail: it notices a small fault of the fused path."""

import pytest

from tests.contract.harness import cases
from tests.support import faults
from tests.support.comparison import assert_far_from_same, assert_fused


@cases("sabotages")
def test_the_comparison_detects_a_fault(case, tmp_path, monkeypatch):
    harness, (fault, options) = case.harness, case.value
    faults.unnoticed_by_probes(monkeypatch)
    fault(monkeypatch)
    options = {**harness.one_step, **options}
    runs = harness.both(tmp_path, **options)
    assert_fused(runs[-1], **harness.fused(options.get("max_steps", 1)))
    with pytest.raises(AssertionError, match="step 0" if "max_steps" not in case.value[1] else r"step \d"):
        harness.assert_same(*runs)
    if harness.far:
        assert_far_from_same(*runs[-2:], runs[-2].in_float64)
