"""The reference memory where ranks run the reference together: all of them skip it or none."""

from itertools import product

import pytest
from rank_comparison import assert_same, assert_same_weights, assert_trained_alike

ENGINES = ("fsdp2", "zero2", "zero3")
SHARDED = ("fsdp2", "zero3")
IN_DIRECTORY = [f"{engine} remembered in a directory" for engine in ("ddp", *SHARDED)]


def reference_calls(run: dict) -> tuple[int, int]:
    """The numbers of batches for which the reference ran and was skipped."""
    return run["calls"]["reference", "fused"], run["calls"]["reference", "remembered"]


@pytest.mark.parametrize(("engine", "what"), product(ENGINES, ["remembered", "remembered lora"]))
def test_each_pair_is_computed_once(ranks, number_of_ranks):
    trained, evaluated = 12 // number_of_ranks, 6 // number_of_ranks  # batches of an epoch and of an evaluation
    for run in assert_trained_alike(ranks):
        # Two epochs and three evaluations, one of them after the training.
        assert reference_calls(run) == (trained + evaluated, trained + 2 * evaluated)


@pytest.mark.parametrize("case", ["tensor parallel remembered"])
def test_ranks_that_share_batches_compute_each_pair_once(case, ranks):
    for run in assert_trained_alike(ranks):
        assert reference_calls(run) == (12 + 6, 12 + 2 * 6)


@pytest.mark.parametrize("case", [f"{engine} forgotten on the last rank" for engine in SHARDED])
def test_all_ranks_run_what_one_misses(case, ranks, number_of_ranks):
    trained, evaluated = 12 // number_of_ranks, 6 // number_of_ranks
    for run in assert_trained_alike(ranks):
        assert reference_calls(run) == (2 * (trained + evaluated), evaluated)


@pytest.mark.parametrize("case", [f"{engine} changed on the last rank" for engine in SHARDED])
def test_all_ranks_notice_a_change_of_one_shard(case, ranks, number_of_ranks):
    trained, evaluated = 12 // number_of_ranks, 6 // number_of_ranks
    for run in assert_trained_alike(ranks):
        assert reference_calls(run) == (2 * (trained + evaluated), evaluated)
        assert any("the reference has changed" in message for message in run["messages"])


@pytest.mark.parametrize("case", [*IN_DIRECTORY, "tensor parallel remembered in a directory"])
def test_a_directory_outlives_the_training(case, ranks):
    for rank in ranks:
        assert_same(rank["stock"], rank["patched"])
        assert_same_weights(rank["patched"], rank["again"])
        assert reference_calls(rank["patched"])[0] > 0
        assert reference_calls(rank["again"])[0] == 0
        assert len(rank["again"]["keys"]) == 1


@pytest.mark.parametrize("cases", [IN_DIRECTORY], ids=["engines"])
def test_the_key_is_that_of_the_whole_reference(cases, ranks_of):
    of_ddp, *others = [ranks_of(case)[0]["again"]["keys"] for case in cases]
    assert others == [of_ddp] * len(others)
