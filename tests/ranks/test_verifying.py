"""`patch(verify=True)` on several ranks: each verifies its own batch, unless ranks share a model."""

import re

import pytest
from rank_comparison import assert_calls, assert_trained_alike

from fastdpo.reasons import Reason


@pytest.mark.parametrize("case", ["ddp verified", "zero2 verified"])
def test_each_rank_verifies_its_batch(case, ranks, number_of_ranks):
    for run in assert_trained_alike(ranks):
        assert_calls(run, batches=12 // number_of_ranks, evaluated=6 // number_of_ranks)
        verified = [x for x in run["messages"] if ": verified; differs in log-probabilities by" in x]
        assert len(verified) == 3  # policy, reference and evaluation
        assert sum("gradient of" in x for x in verified) == 1


@pytest.mark.parametrize("case", ["fsdp2 verified", "zero3 verified"])
def test_a_model_that_ranks_share_is_not_verified(case, ranks, number_of_ranks):
    for run in assert_trained_alike(ranks):
        assert_calls(run, batches=12 // number_of_ranks, evaluated=6 // number_of_ranks)
        messages = run["messages"]
        assert not [x for x in messages if ": verified" in x]
        for role in ("policy", "reference"):
            reason = Reason("verified-ranks").named
            assert messages.count(f"fastdpo: trl.DPOTrainer ({role}): not verified, {reason}") == 1


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fsdp2 verified, strict", r"NotFused: .*not verified, several ranks run the model together"),
        ("ddp verified, wrong on the last rank", r"VerificationError: .*gradient of attention by"),
    ],
)
def test_an_error_ends_the_training(case, trained, message):
    launched = trained[case]
    assert not launched.timed_out
    assert all(code != 0 for code in launched.codes)
    assert re.search(message, launched.outputs[-1]), str(launched)
