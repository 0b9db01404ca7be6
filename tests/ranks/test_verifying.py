"""`patch(verify=True)` on several ranks: each verifies its own batch, with the others where they share a model."""

import re
from itertools import product

import pytest
from rank_comparison import assert_calls, assert_trained_alike

WITH_GRADIENTS = {"ddp": 1, "zero2": 1, "fsdp2": 0, "zero3": 0}
"""By engine, the calls whose gradients are verified: none where ranks share a model, whose gradients it reduces."""


@pytest.mark.parametrize(("engine", "what"), product(WITH_GRADIENTS, ["verified"]))
def test_each_rank_verifies_its_batch(engine, ranks, number_of_ranks):
    for run in assert_trained_alike(ranks):
        assert_calls(run, batches=12 // number_of_ranks, evaluated=6 // number_of_ranks)
        verified = [x for x in run["messages"] if ": verified; differs in log-probabilities by" in x]
        assert len(verified) == 3  # policy, reference and evaluation
        assert sum("gradient of" in x for x in verified) == WITH_GRADIENTS[engine]


@pytest.mark.parametrize(
    ("case", "message"), [("ddp verified, wrong on the last rank", r"VerificationError: .*gradient of attention by")]
)
def test_an_error_ends_the_training(case, trained, message):
    launched = trained[case]
    assert not launched.timed_out
    assert all(code != 0 for code in launched.codes)
    assert re.search(message, launched.outputs[-1]), str(launched)
