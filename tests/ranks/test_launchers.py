"""Every launcher of docs/distributed.md starts the example on two processes of a CPU, with equal losses."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.trl.dpo import pairs, tiny_model, tokenizer
from tests.support.workers.processes import run_launcher

ROOT = Path(__file__).parents[2]
EXAMPLE = Path("examples/distributed")
STEPS = 2
RANKS = 2

LAUNCHERS = {
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", "29511", f"{EXAMPLE}/train.py"],
    "accelerate": [
        *("accelerate", "launch", "--config_file", f"{EXAMPLE}/fsdp2.yaml", "--num_processes", "2"),
        *("--mixed_precision", "no", "--main_process_port", "29512", f"{EXAMPLE}/train.py"),
    ],
    "deepspeed": [
        *("deepspeed", "--num_accelerators", "2", "--master_port", "29513", "tests/ranks/rank_example.py"),
        *("--deepspeed", f"{EXAMPLE}/zero3.json"),
    ],
    "srun": ["bash", f"{EXAMPLE}/train.sbatch"],
    "ray": ["python", f"{EXAMPLE}/ray_train.py", "--workers", "2"],
}

SRUN = """#!/bin/bash
# Starts a command once per task, with the environment that Slurm gives to the tasks of a job.
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
wait -n && wait -n
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    tiny_model().save_pretrained(directory / "model")
    tokenizer().save_pretrained(directory / "model")
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(16)))
    inputs = ["--model", str(directory / "model"), "--dataset", str(directory / "pairs.jsonl")]
    return [*inputs, "--steps", str(STEPS), "--batch-size", "2"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """That of a Slurm job of two tasks on this machine, for all launchers."""
    programs = tmp_path_factory.mktemp("slurm")
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "localhost"}
    others = {"OMP_NUM_THREADS": "1", "MASTER_PORT": "29514", "DS_ACCELERATOR": "cpu", "RAY_TRAIN_V2_ENABLED": "1"}
    return {**os.environ, **slurm, **others, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def losses():
    return {}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_trains_fused_on_two_processes(launcher, arguments, environment, losses, tmp_path):
    command = [*LAUNCHERS[launcher], *arguments, "--out", str(tmp_path)]
    done = run_launcher(command, seconds=600, env=environment, cwd=ROOT)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    loss = re.search(rf"{RANKS} processes, loss ([\d.]+)", output)
    assert loss, output[-6000:]
    calls = re.findall(r"trl\.DPOTrainer: (\d+) (\w+) calls of the (\w+) model", output)
    assert {(path, model) for _, path, model in calls} == {("fused", "policy"), ("fused", "reference")}
    assert all(int(n) == STEPS for n, *_ in calls)
    losses[launcher] = float(loss[1])
    assert all(x == pytest.approx(losses[launcher], abs=2e-6) for x in losses.values()), losses
