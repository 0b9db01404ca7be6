"""`make bench-ops`."""

import os
import subprocess
import sys

from tests.support import ROOT


def test_each_op_is_checked_before_it_is_timed():
    names = "fastdpo and not every and (head or loss or quick)"
    command = [sys.executable, "-m", "pytest", "benchmarks/test_ops.py", "--benchmark-disable", "-q", "-k", names]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 16 passed" in f" {done.stdout.splitlines()[-1]}", done.stdout
