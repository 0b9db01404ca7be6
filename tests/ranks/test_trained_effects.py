"""Models that do more in training than in evaluation: ranks that run one together fall back together."""

import pytest
from rank_comparison import assert_same

from tests.support.models.trained_effects import EFFECTS

CASES = ["fsdp2 balanced experts", "fsdp2 compressed activations", "zero3 compressed activations"]


@pytest.mark.parametrize("case", CASES)
def test_effect(case, ranks):
    reason = EFFECTS[case.split(" ", 1)[1]].reason
    for rank in ranks:
        assert_same(rank["stock"], rank["patched"])
        assert rank["patched"]["calls"]["policy", "stock"]
        assert ("policy", "fused") not in rank["patched"]["calls"]
        assert any(f"[{reason}]" in message for message in rank["patched"]["messages"])
