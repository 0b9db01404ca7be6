"""`patch(longest_first=True)` on several ranks, each of which rehearses its own largest batch."""

import pytest
from rank_comparison import assert_same

CASES = [
    "ddp longest first",
    "ddp token budget longest first",
    "fsdp2 longest first",
    "fsdp2 without accumulation longest first",
]


@pytest.mark.parametrize("case", CASES)
def test_training_equals_stock(case, ranks):
    for rank in ranks:
        assert_same(rank["stock"], rank["patched"])
        assert {path for _, path in rank["patched"]["calls"]} == {"fused"}
