"""`fastdpo run` runs unchanged programs fused, and keeps their arguments, exit code and output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastdpo.startup.sitecustomize import VARIABLE

ROOT = Path(__file__).parents[1]
ON = "fastdpo: trl.DPOTrainer"
BIN = Path(sys.executable).parent

TRAIN = """
import inspect, sys
from pathlib import Path
from trl.trainer import dpo_trainer
from trl_runs import build, tiny_model

assert "class DPOTrainer" in inspect.getsource(dpo_trainer)
trainer = build(Path(sys.argv[1]), tiny_model(), tiny_model(seed=1), max_steps=2)
trainer.train()
print("arguments:", sys.argv[2:])
sys.exit(3)
"""


def run(*command: object, program: tuple = (sys.executable, "-m"), path: tuple = (), **variables: str):
    paths = [*map(str, path), str(ROOT), str(ROOT / "tests" / "support")]
    return subprocess.run(
        [*map(str, program), "fastdpo", "run", *map(str, command)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


CALLS = "fastdpo: trl.DPOTrainer calls: policy fused 2, reference fused 2"


def test_a_script_trains_fused_with_its_arguments_and_exit_code(script, tmp_path):
    done = run(script, tmp_path / "out", "--own", "x")
    assert done.returncode == 3, done.stderr
    assert "arguments: ['--own', 'x']" in done.stdout
    assert done.stderr.count(f"{ON} (") == done.stderr.count(CALLS) == 1


@pytest.mark.parametrize("option", ["--no-share-prompts", "--no-share-random-prompts"])
def test_a_module_trains_fused_with_an_option(script, tmp_path, option):
    done = run(option, "-m", "train", tmp_path / "out", path=(tmp_path,))
    assert done.returncode == 3, done.stderr
    assert CALLS in done.stderr


@pytest.mark.parametrize(
    ("directory", "passed_on"), [("cache", str(Path.cwd() / "cache")), ("file:///cache", "file:///cache")]
)
def test_the_directory_of_the_reference_memory(directory, passed_on, tmp_path):
    """A relative path stays that of this process, and a URL is one."""
    program = tmp_path / "options.py"
    program.write_text(f"import json, os; print(json.loads(os.environ['{VARIABLE}'])['options']['reference_memory'])")
    done = run("--reference-memory", directory, program)
    assert done.stdout == f"{passed_on}\n", done.stderr


def test_children_are_patched(script, tmp_path):
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m")
    done = run(script, tmp_path / "out", program=launcher)
    assert done.stderr.count(f"{ON} (") == done.stderr.count(CALLS) == 1, done.stderr


def test_a_program_without_a_trainer_logs_that_fastdpo_is_off(tmp_path):
    (tmp_path / "plain.py").write_text("print('done')")
    done = run(tmp_path / "plain.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.startswith("fastdpo: off, the program has imported none of trl.DPOTrainer, trl.KTOTrainer")
    assert done.stderr.endswith(" [nothing-imported]\n")
    assert done.stderr.count("\n") == 1


def test_only_named_targets_are_patched(tmp_path):
    (tmp_path / "import_trl.py").write_text("import trl.trainer.dpo_trainer")
    done = run("--only", "openrlhf", tmp_path / "import_trl.py")
    assert ON not in done.stderr
    assert "fastdpo: off" in done.stderr


def test_a_directory_does_not_hide_a_command(tmp_path, monkeypatch):
    """As in the parent directory of a clone of TRL."""
    (tmp_path / "trl").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "usage: trl" in run("trl", "--help").stdout


def test_another_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('customized')")
    (tmp_path / "plain.py").write_text("")
    assert run(tmp_path / "plain.py", path=(tmp_path,)).stdout.splitlines()[-1] == "customized"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((), "fastdpo run: command must not be empty"),
        (("no-such-command",), "fastdpo run: command must be a script, -m and a module, or a command on PATH; got"),
        (("--only", "trl.PPOTrainer", "x.py"), "fastdpo run: targets must be among trl.DPOTrainer"),
    ],
)
def test_misuse_is_an_error_of_one_line(command, message):
    done = run(*command)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


WRONG = """
from fastdpo.models import head

right = head.linear_logps

def wrong(*args, **kwargs):
    scored = right(*args, **kwargs)
    return scored._replace(logps=scored.logps * 1.01)

head.linear_logps = wrong
"""


def test_strict_and_verified(tmp_path):
    (tmp_path / "planted.py").write_text(WRONG + TRAIN)
    done = run("--verify", "--strict", tmp_path / "planted.py", tmp_path / "out")
    assert done.returncode == 1
    assert "VerificationError: fastdpo: trl.DPOTrainer (policy): the fused path differs" in done.stderr
    (tmp_path / "strict.py").write_text("import os; print(os.environ['FASTDPO_STRICT'])")
    assert run("--strict", tmp_path / "strict.py").stdout == "1\n"
