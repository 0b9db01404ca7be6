"""Two ranks under DeepSpeed's ZeRO on a CPU: patched equals stock in logs, weights and collectives."""

import pytest
import torch
from openrlhf_runs import run_two_ranks

from tests.support.comparison import assert_same_gradients, assert_same_logs

STAGES = 2, 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_two_ranks(tmp_path_factory.mktemp("ranks"), *STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks(ranks, stage):
    of_stage = [rank[stage] for rank in ranks]
    for rank in of_stage:
        stock, patched = rank["stock"], rank["patched"]
        assert not stock["calls"]
        assert patched["calls"] == {("policy", "fused"): 3, ("reference", "fused"): 3}
        assert_same_logs(stock["logs"], patched["logs"])
        assert_same_gradients([stock["weights"]], [patched["weights"]])
        for name in stock["weights"]:
            assert torch.equal(patched["weights"][name], of_stage[0]["patched"]["weights"][name])
        rewards, of_stock = patched["rewards"], stock["rewards"]
        assert rewards["calls"] == {("openrlhf.RewardModelTrainer", "policy", "fused"): 3}
        assert_same_logs(of_stock["logs"], rewards["logs"])
        assert_same_gradients([of_stock["weights"]], [rewards["weights"]])
        assert rank["collectives"]["patched"] == rank["collectives"]["stock"] > 0
