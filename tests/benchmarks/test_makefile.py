"""`make bench-gpu` runs the remaining steps after one fails, but does not time incorrect ops."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


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


@pytest.mark.thorough  # each step has tests of its own
def test_bench_gpu_without_a_gpu(tmp_path):
    """Each step runs, on a part of its cases."""
    given = {"GPU_PYTHON": sys.executable, "GPU_DEVICE": "cpu", "GPU_OUT": tmp_path, "GPU_SUITES": "head"}
    given |= {"GPU_TESTS": "--quick --jobs 1 -k large_gpu", "ARGS": "--quick --cases trainable,.summed"}
    command = ["make", "bench-gpu", *(f"{name}={x}" for name, x in given.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " PASSED " in "".join(log.read_text() for log in tmp_path.glob("tests-*.log"))
    (case,) = json.loads((tmp_path / "head.json").read_text())["cases"]
    assert case["sides"]["fastdpo"]["status"] == "measured"
    assert "fastdpo" in (tmp_path / "accuracy.json").read_text()
