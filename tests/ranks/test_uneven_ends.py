"""Logs of epochs that do not divide evenly among the ranks.

At the end of such an epoch stock leaves out the values of some ranks. Patched includes all ranks.
"""

import pytest
from rank_comparison import assert_same_weights
from rank_launch import run_cases

from tests.support.comparison import approximately, assert_same_gradients, assert_same_logs

CUT = {"entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy", "num_tokens"}
"""Metrics with one value per rank.

At the end of an epoch accelerate's `gather_for_metrics` treats these values as rows, and keeps only
as many of them as there are rows left.
"""


@pytest.fixture
def alone(case, number_of_ranks, tmp_path):
    """The results of one process on the concatenated batches of all ranks."""
    trained = case.removeprefix("ddp ").replace("token budget ", "")
    name = f"{trained} of {number_of_ranks} ranks in one process"
    return run_cases([name], 1, tmp_path)[name][0]


@pytest.mark.parametrize("case", ["ddp uneven end"])
def test_the_end_of_an_epoch(case, ranks, alone, number_of_ranks):
    epoch = -(-13 // (2 * number_of_ranks))
    for rank in ranks:
        stock, patched, truth = rank["stock"], rank["patched"], alone["stock"]
        assert_same_logs(truth["logs"], patched["logs"])
        assert_same_gradients(truth["gradients"], with_plain_names(patched["gradients"]))
        assert_same_gradients(stock["gradients"], patched["gradients"])
        assert_same_weights(stock, patched)
        different = [
            {name for name in a if b[name] != approximately(a[name])}
            for a, b in zip(stock["logs"], patched["logs"], strict=True)
        ]
        first, second, (total,) = different[:epoch], different[epoch : 2 * epoch], different[2 * epoch :]
        assert first == [*[set()] * (epoch - 1), CUT]
        assert second == [*[{"num_tokens"}] * (epoch - 1), CUT]  # num_tokens is a running sum
        assert total == set()


@pytest.mark.parametrize("case", ["ddp reward token budget uneven end"])
def test_pairs_that_are_dealt_to_the_ranks(ranks, alone):
    for rank in ranks:
        assert_same_logs(alone["stock"]["logs"], rank["patched"]["logs"])


def with_plain_names(gradients: list[dict]) -> list[dict]:
    return [{name.removeprefix("module."): x for name, x in step.items()} for step in gradients]
