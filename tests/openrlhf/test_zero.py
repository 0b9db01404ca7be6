"""Two ranks under DeepSpeed's ZeRO on a CPU: patched equals stock in logs, weights and collectives."""

import pytest
import torch
from openrlhf_runs import run_two_ranks

from tests.support.comparison import assert_same_gradients, assert_same_logs


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks(tmp_path, stage):
    ranks = run_two_ranks(tmp_path, stage)
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert not stock["calls"]
        assert patched["calls"] == {("policy", "fused"): 3, ("reference", "fused"): 3}
        assert_same_logs(stock["logs"], patched["logs"])
        assert_same_gradients([stock["weights"]], [patched["weights"]])
        for name in stock["weights"]:
            assert torch.equal(patched["weights"][name], ranks[0]["patched"]["weights"][name])
        rewards, of_stock = patched["rewards"], stock["rewards"]
        assert rewards["calls"] == {("openrlhf.RewardModelTrainer", "policy", "fused"): 3}
        assert_same_logs(of_stock["logs"], rewards["logs"])
        assert_same_gradients([of_stock["weights"]], [rewards["weights"]])
        assert rank["collectives"]["patched"] == rank["collectives"]["stock"] > 0
