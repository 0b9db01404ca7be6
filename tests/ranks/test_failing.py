"""A rank that fails inside `with fastdpo.patched():` reports its exception and ends the job."""

import pytest


@pytest.mark.parametrize("case", ["ddp stock raises", "ddp patched raises"])
def test_a_rank_that_raises(case, trained):
    launched = trained[case]
    assert not launched.timed_out
    assert all(code != 0 for code in launched.codes)
    *_, last = launched.outputs
    assert "RuntimeError: the last rank fails in its second step" in last
    assert launched.codes[-1] == 1, "the failing rank exits with its exception"
    for output in launched.outputs:
        assert "Timed out waiting" not in output, "no rank waits for one that has failed"
