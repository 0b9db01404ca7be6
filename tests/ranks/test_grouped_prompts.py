"""`patch(group_prompts=True)` on several ranks: the training of stock on pairs that stand in this order."""

import pytest
from rank_comparison import assert_same


@pytest.mark.parametrize("what", ["grouped prompts", "grouped prompts token budget"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_training_equals_stock(ranks):
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert_same(stock, patched)
        assert {path for _, path in patched["calls"]} == {"fused"}
