"""`make bench-gpu` runs the remaining steps after one fails, but does not time incorrect ops."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("failing", "steps"),
    [
        ("nothing", ["device_tests --device cuda", "--suite head", "--suite step", "accuracy"]),
        ("device_tests", ["device_tests --device cuda", "accuracy"]),
        ("--suite head", ["device_tests --device cuda", "--suite head", "--suite step", "accuracy"]),
        ("accuracy", ["device_tests --device cuda", "--suite head", "--suite step", "accuracy"]),
    ],
)
def test_bench_gpu(failing, steps, tmp_path):
    log, python = tmp_path / "log", tmp_path / "python"
    log.touch()
    python.write_text(f'#!/bin/sh\necho "$*" >> {log}\ncase "$*" in *"{failing}"*) exit 3;; esac\n')
    python.chmod(0o755)
    command = ["make", "bench-gpu", f"GPU_PYTHON={python}", "GPU_SUITES=head step"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == (failing == "nothing"), done.stderr
    calls = log.read_text().splitlines()
    assert len(calls) == len(steps)
    assert all(step in call for step, call in zip(steps, calls, strict=True))
