"""`patch(verify=True)` on several ranks: each verifies its own batch."""

import re

import pytest
from rank_comparison import assert_calls, assert_trained_alike


@pytest.mark.parametrize("case", ["ddp verified", "zero2 verified"])
def test_each_rank_verifies_its_batch(case, ranks, number_of_ranks):
    for run in assert_trained_alike(ranks):
        assert_calls(run, batches=12 // number_of_ranks, evaluated=6 // number_of_ranks)
        verified = [x for x in run["messages"] if ": verified; differs in log-probabilities by" in x]
        assert len(verified) == 3  # policy, reference and evaluation
        assert sum("gradient of" in x for x in verified) == 1


@pytest.mark.parametrize("case", ["fsdp2 verified", "zero3 verified"])
def test_ranks_verify_a_model_that_they_share_together(case, ranks, number_of_ranks):
    """Without gradients, which an engine reduces."""
    for run in assert_trained_alike(ranks):
        assert_calls(run, batches=12 // number_of_ranks, evaluated=6 // number_of_ranks)
        verified = [x for x in run["messages"] if ": verified; differs in log-probabilities by" in x]
        assert len(verified) == 3  # policy, reference and evaluation
        assert not [x for x in verified if "gradient of" in x]


@pytest.mark.parametrize(
    ("case", "message"), [("ddp verified, wrong on the last rank", r"VerificationError: .*gradient of attention by")]
)
def test_an_error_ends_the_training(case, trained, message):
    launched = trained[case]
    assert not launched.timed_out
    assert all(code != 0 for code in launched.codes)
    assert re.search(message, launched.outputs[-1]), str(launched)
