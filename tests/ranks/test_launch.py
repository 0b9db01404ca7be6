"""A launch ends within its time limit even if ranks hang or fail, and shows their output."""

import time
from pathlib import Path

import pytest
import rank_launch

HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("rank", os.environ["RANK"], "child", child.pid, flush=True)
time.sleep(600)
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("this rank fails")
time.sleep(600)
"""


def ends(process: int) -> bool:
    """Whether a process ends within 5 seconds. A zombie, whose command line is empty, has ended."""
    command = Path(f"/proc/{process}/cmdline")
    for _ in range(50):
        if not command.exists() or not command.read_bytes():
            return True
        time.sleep(0.1)
    return False


@pytest.fixture
def launch(tmp_path):
    def start(script: str, seconds: float) -> rank_launch.Launched:
        path = tmp_path / "script.py"
        path.write_text(script)
        begin = time.monotonic()
        launched = rank_launch.launch(path, [], 2, seconds, tmp_path / "logs")
        assert time.monotonic() - begin < 30
        return launched

    return start


def test_ranks_that_hang_are_killed_with_their_children(launch):
    launched = launch(HANGS, seconds=3)
    assert launched.timed_out
    assert launched.codes == (-9, -9)
    for rank, output in enumerate(launched.outputs):
        assert f"last output of rank {rank}:\n{output}" in str(launched)
        assert f"rank {rank} child" in output
        assert ends(int(output.split()[-1]))


def test_a_failing_rank_ends_the_others(launch, monkeypatch):
    monkeypatch.setattr(rank_launch, "GRACE", 1.0)
    launched = launch(FAILS, seconds=60)
    assert not launched.timed_out
    assert launched.codes == (-9, 1)
    assert "this rank fails" in str(launched)
