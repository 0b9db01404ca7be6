"""Batches and models that one rank can pack and another cannot, under sharded engines."""

import pytest
from rank_comparison import assert_same


@pytest.mark.parametrize("case", ["fsdp2 holes on the last rank", "zero3 holes on the last rank"])
def test_a_batch_that_one_rank_cannot_pack(case, ranks, number_of_ranks):
    for rank in ranks:
        assert_same(rank["stock"], rank["patched"])
        calls = rank["patched"]["calls"]
        assert calls["policy", "fused"] >= 12 // number_of_ranks - 1, "the other batches are fused"
        assert calls["eval", "fused"] == 6 // number_of_ranks


MODELS = ["fails the probe on the last rank", "not qualified on the last rank"]


@pytest.mark.parametrize("case", [f"{engine} {model}" for engine in ("fsdp2", "zero3") for model in MODELS])
def test_a_model_that_one_rank_cannot_pack(case, ranks):
    for rank in ranks:
        assert_same(rank["stock"], rank["patched"])
        assert {path for _, path in rank["patched"]["calls"]} == {"stock"}
