"""A training on several ranks that is unpatched midway continues as stock."""

import pytest
from rank_comparison import assert_same_weights

from tests.support.comparison import assert_same_gradients, assert_same_logs


@pytest.mark.parametrize("case", ["ddp unpatched"])
def test_the_training_continues_as_stock(case, ranks):
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert_same_gradients(stock["gradients"], patched["gradients"])
        assert_same_weights(stock, patched)
        # Values that were not yet reduced are those of one rank: the first means, and a part of
        # num_tokens.
        later = [
            [{k: x for k, x in log.items() if "num_tokens" not in k} for log in run["logs"][1:]]
            for run in rank.values()
        ]
        assert_same_logs(*later)
        first = [{name: run["logs"][0][name] for name in ("loss", "grad_norm")} for run in (stock, patched)]
        assert_same_logs(first[:1], first[1:])
        assert stock["logs"][0].keys() == patched["logs"][0].keys()
