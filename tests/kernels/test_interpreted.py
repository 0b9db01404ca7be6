"""Runs tests where Triton's interpreter stands in for a GPU, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OPS = HERE.parent / "ops"
IGNORED = "ignore::RuntimeWarning:triton"  # NumPy's, about infinities that a GPU takes in silence
WAYS = "each_option or each_way_back or a_gap_of"
RUNS = {  # files or folders, which of their tests, and the environment
    "kernels": ([HERE / "interpreted"], "", {}),
    "heads": ([OPS / "test_linear_logps.py"], WAYS, {}),
    "fused heads": ([OPS / "test_linear_logps.py"], WAYS, {"FASTDPO_HEAD_TABLE": str(HERE / "fused_heads.json")}),
    "attention": ([OPS / "test_packed_attention.py"], "every_feature and pairs and not blocks and not products", {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_interpreted_kernels(name, pytestconfig):
    pytest.importorskip("triton")
    quick = pytestconfig.getoption("quick")
    files, which, variables = RUNS[name]
    options = ["-q", "-p", "no:cacheprovider", "-W", IGNORED, "-k", which]
    options += [] if name == "kernels" else ["--device", "interpreter"]
    options += ["--quick"] if quick else []
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = re.fullmatch(r"(\d+) passed(, \d+ deselected)?(, \d+ warnings?)? in .*", done.stdout.splitlines()[-1])
    assert summary, done.stdout  # none was skipped
    passed = int(summary[1])
    if which:
        assert passed >= (5 if quick else 20), done.stdout
    else:  # every test function ran at least once
        sources = [path for folder in files for path in folder.glob("test_*.py")]
        assert passed >= sum(len(re.findall(r"^def test_", path.read_text(), re.M)) for path in sources) > 0, (
            done.stdout
        )
