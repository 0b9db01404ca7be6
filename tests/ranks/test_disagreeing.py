"""Batches and models that one rank can pack and another cannot, under sharded engines."""

from collections.abc import Iterable
from itertools import product

import pytest
from rank_comparison import assert_trained_alike
from rank_reasons import AGREED, AROUND_CALLS, OF_CALLS

ENGINES = ["fsdp2", "zero3"]


@pytest.mark.parametrize("case", [f"{engine} holes on the last rank" for engine in ENGINES])
def test_a_batch_that_one_rank_cannot_pack(case, ranks, number_of_ranks):
    for run in assert_trained_alike(ranks):
        calls = run["calls"]
        assert calls["policy", "fused"] >= 12 // number_of_ranks - 1, "the other batches are fused"
        assert calls["eval", "fused"] == 6 // number_of_ranks


MODELS = ["fails the probe on the last rank", "not qualified on the last rank"]


@pytest.mark.parametrize(("engine", "what"), product(ENGINES, MODELS))
def test_a_model_that_one_rank_cannot_pack(case, ranks):
    for run in assert_trained_alike(ranks):
        assert {path for _, path in run["calls"]} == {"stock"}


ON_THE_FIRST = " on the first rank"


@pytest.mark.parametrize(("engine", "what"), product(ENGINES, [reason + ON_THE_FIRST for reason in AGREED]))
def test_a_reason_of_the_model_that_one_rank_has(what, ranks):
    reason = what.removesuffix(ON_THE_FIRST)
    for run in assert_trained_alike(ranks):
        assert {path for _, path in run["calls"]} == {"stock"}
        assert any(f"[{reason}]" in message for message in run["messages"])


@pytest.mark.parametrize("case", [f"{engine} each call of the first rank" for engine in ENGINES])
def test_a_reason_of_the_call_that_one_rank_has(case, ranks):
    assert_padded_on_the_first(ranks, OF_CALLS)
    assert {path for _, path in ranks[0]["patched"]["calls"]} == {"padded"}


OF_TRAINING = [reason + ON_THE_FIRST for reason in ("attention-dropout", "image-arguments", *AROUND_CALLS)]


@pytest.mark.parametrize(("engine", "what"), product(ENGINES, OF_TRAINING))
def test_a_reason_of_training_calls_that_one_rank_has(what, ranks):
    assert_padded_on_the_first(ranks, [what.removesuffix(ON_THE_FIRST)])
    assert {path for kind, path in ranks[0]["patched"]["calls"] if kind == "policy"} == {"padded"}


@pytest.mark.parametrize("case", ["fsdp2 images on the first rank"])
def test_images_that_one_rank_has(ranks):
    """ZeRO-3 gathers the weights of the image tower on this rank alone, so that stock ends with an error."""
    assert_padded_on_the_first(ranks, ["image-ranks"])


@pytest.mark.parametrize("case", [f"{engine} model changes on the first rank" for engine in ENGINES])
def test_a_model_that_changes_on_one_rank(case, ranks):
    assert_padded_on_the_first(ranks, ["head-hooks", "head-forward", "changed-model"], later={"eval"})
    assert ranks[0]["patched"]["calls"]["policy", "fused"] == 1
    evaluated = {path for rank in ranks for kind, path in rank["patched"]["calls"] if kind == "eval"}
    assert evaluated == {"padded"}, "it has a hook when it is first examined in evaluation mode"


def assert_padded_on_the_first(ranks: list[dict], reasons: Iterable[str], later: Iterable[str] = ()) -> None:
    """The other ranks run packed batches, but for kinds of calls whose models are examined later."""
    assert_trained_alike(ranks)
    first, *others = (rank["patched"] for rank in ranks)
    logged = "".join(first["messages"])
    assert [reason for reason in reasons if f"[{reason}]" not in logged] == []
    for other in others:
        assert {path for kind, path in other["calls"] if kind not in later} == {"fused"}
