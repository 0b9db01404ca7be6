"""Models that do more in training than in evaluation: ranks that run one together fall back together."""

import pytest
from rank_comparison import assert_trained_alike

from tests.support.models.trained_effects import EFFECTS

CASES = ["fsdp2 balanced experts", "fsdp2 compressed activations", "zero3 compressed activations"]


@pytest.mark.parametrize("case", CASES)
def test_effect(case, ranks):
    (reason,) = EFFECTS[case.split(" ", 1)[1]].reasons
    for run in assert_trained_alike(ranks):
        assert run["calls"]["policy", "stock"]
        assert ("policy", "fused") not in run["calls"]
        assert any(f"[{reason}]" in message for message in run["messages"])
