"""Tensor parallelism is not packed, since each rank has a part of every layer and of the head.

It falls back to TRL.
"""

from collections import Counter

import pytest
from rank_comparison import assert_same


@pytest.mark.parametrize("case", ["tensor parallel"])
def test_it_falls_back_to_stock(case, ranks):
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert stock["sharded"] > 0.5
        assert_same(stock, patched)
        assert patched["calls"] == Counter(
            {("policy", "stock"): 12, ("reference", "stock"): 12 + 6, ("eval", "stock"): 6}
        )
