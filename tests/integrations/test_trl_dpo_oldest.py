"""The oldest supported TRL, patched, against the one that is installed, patched: the same training.

There is nothing else to compare it with: stock, 1.15 needs a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trl_runs import Run, assert_fused, assert_same, tiny_model, train

import fastdpo

WORKER = Path(__file__).parents[1] / "support" / "trl_worker.py"


def test_same_training(tmp_path):
    directory = os.environ.get("OLDEST_TRL")
    if directory is None:
        pytest.skip("OLDEST_TRL must be the folder of trl 1.15.0; `make test` installs and names it")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": directory, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = torch.load(tmp_path / "run.pt")
    oldest = Run(**result["run"])
    assert result["version"] == "1.15.0"
    with fastdpo.patched("trl.DPOTrainer"):
        newest = train(tmp_path / "newest", tiny_model(seed=0), tiny_model(seed=1), evaluate=6)
    for run in (oldest, newest):
        assert_fused(run, policy=3, reference=3 + 2, eval=2)
    assert_same(oldest, newest)
