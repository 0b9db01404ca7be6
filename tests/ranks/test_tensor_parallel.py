"""Tensor parallelism cuts the head, so every call is TRL's own, next to FSDP2 as well."""

import pytest
from rank_comparison import assert_trained_alike


@pytest.mark.parametrize("case", ["tensor parallel", "tensor parallel tied", "fsdp2 of tensor parallel"])
def test_training_is_that_of_stock(case, ranks):
    for run in assert_trained_alike(ranks):
        assert run["sharded"] > 0.5
        assert {path for _, path in run["calls"]} == {"stock"}
        assert any("[split-head]" in message for message in run["messages"])
