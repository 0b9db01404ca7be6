"""Runs `interpreted/`, where Triton's interpreter stands in for a GPU, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
IGNORED = "ignore::RuntimeWarning:triton"  # NumPy's, about infinities that a GPU takes in silence


def test_interpreted_kernels():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", IGNORED, str(FOLDER)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # Every test function ran at least once, and none was skipped or deselected.
    functions = sum(len(re.findall(r"^def test_", path.read_text(), re.M)) for path in FOLDER.glob("test_*.py"))
    summary = re.fullmatch(r"(\d+) passed(, \d+ warnings?)? in .*", done.stdout.strip().splitlines()[-1])
    assert summary, done.stdout
    assert int(summary[1]) >= functions > 0, done.stdout
