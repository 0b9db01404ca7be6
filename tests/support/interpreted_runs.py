"""Runs of pytest under Triton's interpreter, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1]
KERNELS = TESTS / "kernels"
OPS = TESTS / "ops"
IGNORED = "ignore::RuntimeWarning:triton"  # NumPy warns about infinities, GPUs do not
HEAD_TESTS = "each_option or each_mode or a_gap_of"
RUNS = {  # files or folders, expression that selects tests, environment variables
    "kernels": ([KERNELS / "interpreted"], "", {}),
    "heads": ([OPS / "test_linear_logps.py"], HEAD_TESTS, {}),
    "fused heads": (
        [OPS / "test_linear_logps.py"],
        HEAD_TESTS,
        {"FASTDPO_HEAD_TABLE": str(KERNELS / "fused_heads.json")},
    ),
    "attention": ([OPS / "test_packed_attention.py"], "every_feature and pairs and not blocks and not products", {}),
}


def start(names: Iterable[str], quick: bool) -> dict[str, Future[subprocess.CompletedProcess]]:
    """Starts the named runs one after another in the background.

    Returns a future for each name, whose result is the completed pytest process.
    """
    pool = ThreadPoolExecutor(max_workers=1)
    return {name: pool.submit(_run, name, quick) for name in names}


def _run(name: str, quick: bool) -> subprocess.CompletedProcess:
    files, expression, variables = RUNS[name]
    options = ["-q", "-p", "no:cacheprovider", "-W", IGNORED, "-k", expression]
    options += [] if name == "kernels" else ["--device", "interpreter"]
    options += ["--quick"] if quick else []
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True)
