"""Tensor parallelism: each rank has a part of every layer and of the vocabulary, and the same batches."""

import pytest
import torch
from rank_comparison import assert_calls, assert_same, assert_trained_alike


@pytest.mark.parametrize(
    "case", ["tensor parallel", "tensor parallel tied", "tensor parallel checkpointing", "tensor parallel lora"]
)
def test_training_equals_stock(case, ranks):
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert stock["sharded"] > 0.5
        assert patched["sharded"] == stock["sharded"]
        assert_same(stock, patched)
        assert_calls(patched, batches=12, evaluated=6)
        for name, weight in patched["weights"].items():
            assert torch.equal(weight, ranks[0]["patched"]["weights"][name]), f"{name} differs between the ranks"


@pytest.mark.parametrize("case", ["fsdp2 of tensor parallel", "fsdp2 of tensor parallel tied"])
def test_fsdp2_of_ranks_that_share_layers(case, ranks):
    """Two halves of the ranks get different batches."""
    for rank in ranks:
        assert rank["patched"]["sharded"] > 0.8
        assert_same(rank["stock"], rank["patched"])
        assert_calls(rank["patched"], batches=6)


@pytest.mark.parametrize("case", ["tensor parallel holes"])
def test_a_batch_that_cannot_be_packed(case, ranks):
    for run in assert_trained_alike(ranks):
        assert_calls(run, batches=12, evaluated=6, unpacked=1, path="padded")
