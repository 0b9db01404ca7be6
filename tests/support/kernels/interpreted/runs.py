"""Runs of pytest under Triton's interpreter, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support import ROOT

TESTS = ROOT / "tests"
KERNELS = TESTS / "kernels"
OPS = TESTS / "ops"
IGNORED = "ignore::RuntimeWarning:triton"  # NumPy warns about infinities, GPUs do not
RUNS = {  # files or folders, expression that selects tests
    "kernels": ([KERNELS / "interpreted"], ""),
    "ops": (
        [OPS / f"test_{name}.py" for name in ("contract", "linear_logps", "packed_attention", "token_logps")],
        "each_mode or a_gap_of or (every_feature and pairs and not blocks and not products) or "
        "(test_token_logps.py and (statistics_do or without_a_check or masked or of_large or "
        "special_rows)) or (test_contract.py and ((plain_pytorch and (token_logps or linear_logps)) or "
        "(other_strides and attention and (window or sinks)) or "
        "((test_ignored or empty or missing or int32 or expanded or other_strides) and token_logps and plain)))",
    ),
}


def run(name: str, quick: bool) -> subprocess.CompletedProcess:
    """Runs pytest on the tests of a name, and returns the completed process."""
    files, expression = RUNS[name]
    options = ["-q", "-p", "no:cacheprovider", "-W", IGNORED, "-k", expression]
    options += [] if name == "kernels" else ["--device", "interpreter"]
    options += ["--quick"] if quick else []
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)
