"""Families of models in each trainer: fused, and equal to stock."""

from tests.contract.harness import cases
from tests.support.comparison import assert_fused


@cases("families")
def test_family(case, tmp_path):
    runs = case.harness.both(tmp_path, max_steps=2, **case.value)
    assert_fused(runs[-1], **case.harness.fused(2))
    case.harness.assert_same(*runs)
