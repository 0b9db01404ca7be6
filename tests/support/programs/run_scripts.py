"""Scripts that train and do not name fastdpo, for `fastdpo run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.programs.run_command import run

SCRIPTS = {
    "trl.DPOTrainer": """
import sys
from pathlib import Path
from tests.support.trl.dpo import build, tiny_model

build(Path(sys.argv[1]), tiny_model(), tiny_model(seed=1), max_steps=1).train()
""",
    "trl.OnlineDPOTrainer": """
import sys
from pathlib import Path
from tests.support.trl.online import build, writer

build(Path(sys.argv[1]), writer(), writer(seed=1), max_steps=1).train()
""",
    "trl.RewardTrainer": """
import sys
from pathlib import Path
from tests.support.trl.reward import reward_model, train_reward

train_reward(Path(sys.argv[1]), reward_model(), max_steps=1)
""",
    "openrlhf.DPOTrainer": """
import sys
from pathlib import Path
from openrlhf_runs import Strategy, checkpoint, rows, train

paths = [checkpoint(Path(sys.argv[1]), seed=seed) for seed in range(2)]
train(*paths, Strategy(), data=rows(4))
""",
    "openrlhf.RewardModelTrainer": """
import sys
from pathlib import Path
from openrlhf_runs import Strategy, checkpoint, train_rewards

train_rewards(checkpoint(Path(sys.argv[1])), Strategy(), batch=12)
""",
}
"""By the trainer. Each takes one step, in a directory that is its argument."""


def assert_trains_fused(directory: Path, *trainers: str, **options: Any) -> None:
    """Runs the scripts of trainers as one, since a start takes longer than all of them, and asserts that each is fused.

    Args:
        directory: for the script and its output.
        trainers: some of `SCRIPTS`.
        options: of `run`.
    """
    script = directory / "train.py"
    script.write_text("".join(SCRIPTS[trainer] for trainer in trainers))
    (directory / "out").mkdir()
    done = run(script, directory / "out", **options)
    assert done.returncode == 0, done.stderr
    for trainer in trainers:
        calls = "policy fused 1" + (", reference fused 1" if "DPO" in trainer else "")
        assert f"fastdpo: {trainer} calls: {calls}; 100% of calls fused" in done.stderr
