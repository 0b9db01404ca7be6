"""Each option of a trainer: on the expected path, and equal to stock."""

from tests.contract.harness import cases
from tests.support.comparison import assert_fused


@cases("options")
def test_option(case, tmp_path):
    options, calls = case.value
    runs = case.harness.both(tmp_path, **options)
    assert not runs[0].calls
    assert_fused(runs[-1], **calls)
    assert ("aux_loss" in runs[0].logs[0]) == case.name.startswith("router loss")
    case.harness.assert_same(*runs)
