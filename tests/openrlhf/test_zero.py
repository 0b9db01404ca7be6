"""Two ranks under DeepSpeed's ZeRO on a CPU, stock against patched: logs, weights, collectives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from openrlhf_runs import checkpoint

WORKER = Path(__file__).with_name("zero_worker.py")
PATHS = [str(WORKER.parent), str(WORKER.parent / "stand_ins"), *filter(None, [os.environ.get("PYTHONPATH")])]


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks(tmp_path, stage):
    for seed in range(2):
        checkpoint(tmp_path, seed=seed)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(WORKER), str(stage), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
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
