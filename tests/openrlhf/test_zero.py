"""Two ranks under DeepSpeed's ZeRO on a CPU, stock against patched: logs, weights, collectives."""

import pytest
import torch
from openrlhf_runs import run_two_ranks


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks(tmp_path, stage):
    ranks = run_two_ranks(tmp_path, stage)
    for rank in ranks:
        stock, patched = rank["stock"], rank["patched"]
        assert not stock["calls"]
        assert patched["calls"] == {("policy", "fused"): 3, ("reference", "fused"): 3}
        for a, b in zip(stock["logs"], patched["logs"], strict=True):
            assert a.keys() == b.keys()
            for name in a:
                assert abs(a[name] - b[name]) <= 1e-5 * abs(a[name]) + 2e-6, name
        for name, a in stock["weights"].items():
            assert (a - patched["weights"][name]).norm() <= 1e-5 * a.norm(), name
            assert torch.equal(patched["weights"][name], ranks[0]["patched"]["weights"][name])
        numbers = len(stock["logs"][0]) - 2  # two means are taken after
        assert rank["collectives"] == {"stock": 3 * numbers, "patched": 3}
