"""`fastdpo run` runs unchanged programs fused, and keeps their arguments, exit code and output."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.programs.run_command import run

ON = "fastdpo: trl.DPOTrainer"
BIN = Path(sys.executable).parent

TRAIN = """
import importlib.util, inspect, sys
from pathlib import Path
assert importlib.util.find_spec("trl.trainer.dpo_trainer")  # as programs look for what they import later
from trl.trainer import dpo_trainer
from tests.support.trl.dpo import build, tiny_model

assert "class DPOTrainer" in inspect.getsource(dpo_trainer)
trainer = build(Path(sys.argv[1]), tiny_model(), tiny_model(seed=1), max_steps=2)
trainer.train()
print("arguments:", sys.argv[2:])
sys.exit(3)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


CALLS = "fastdpo: trl.DPOTrainer calls: policy fused 2, reference fused 2"


def test_a_script_trains_fused_with_its_arguments_and_exit_code(script, tmp_path):
    done = run("--no-share-prompts", script, tmp_path / "out", "--own", "x")
    assert done.returncode == 3, done.stderr
    assert "arguments: ['--own', 'x']" in done.stdout
    assert done.stderr.count(f"{ON} (") == done.stderr.count(CALLS) == 1
    assert "; share_prompts=False\n" in done.stderr


def test_a_module_trains_fused_and_says_what_its_options_did(script, tmp_path):
    options = "--no-share-prompts", "--verify", "--max-tokens", 60
    done = run(*options, "-m", "train", tmp_path / "out", path=(tmp_path,), warm=True)
    assert done.returncode == 3, done.stderr
    assert "fastdpo: trl.DPOTrainer calls: reference fused" in done.stderr
    assert re.search(
        r"; share_prompts=False; max_tokens=60 \(2 steps in \d micro-batches\); "
        r"verify=True \(first calls that agreed with stock ones: [1-9]\)\n",
        done.stderr,
    ), done.stderr


def test_children_are_patched(script, tmp_path):
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m")
    done = run(script, tmp_path / "out", program=launcher)
    assert done.stderr.count(f"{ON} (") == done.stderr.count(CALLS) == 1, done.stderr


def test_a_program_without_a_trainer_logs_that_fastdpo_is_off(tmp_path):
    (tmp_path / "plain.py").write_text("print('done')")
    done = run(tmp_path / "plain.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.startswith("fastdpo: off, the program has imported none of trl.A2POTrainer, trl.CPOTrainer")
    assert done.stderr.endswith(" [nothing-imported]\n")
    assert done.stderr.count("\n") == 1


def test_a_program_that_crashes_prints_its_traceback_alone(tmp_path):
    (tmp_path / "crash.py").write_text("raise KeyError('mine')")
    done = run(tmp_path / "crash.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
    assert "fastdpo: off" not in done.stderr


def test_a_module_that_does_not_exist_prints_the_error_of_python_alone():
    done = run("-m", "no.such.module")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Error while finding module specification for 'no.such.module'" in done.stderr


@pytest.mark.parametrize("options", [("--verify",), pytest.param((), marks=pytest.mark.thorough)])
def test_options_of_a_program_that_calls_no_model(options, tmp_path):
    (tmp_path / "import_trl.py").write_text("import trl.trainer.dpo_trainer, trl.trainer.kto_trainer")
    done = run(*options, tmp_path / "import_trl.py", warm=True)
    assert done.returncode == 0
    line = "fastdpo: trl.DPOTrainer, trl.KTOTrainer calls: none; verify=True (no call was compared)\n"
    assert done.stderr.endswith(line) == bool(options), done.stderr
    assert done.stderr.count("calls: ") == len(options)


def test_options_of_a_program_whose_children_train(script, tmp_path):
    """A parent that imports a trainer and calls no model says nothing."""
    (tmp_path / "launch.py").write_text(
        "import subprocess, sys\nimport trl.trainer.dpo_trainer\nsubprocess.run([sys.executable, *sys.argv[1:]])"
    )
    done = run("--verify", tmp_path / "launch.py", script, tmp_path / "out", warm=True)
    assert done.stderr.count("calls: ") == done.stderr.count(f"{CALLS}; ") == 1, done.stderr


def test_only_named_targets_are_patched(tmp_path):
    """A package that does nothing stands in for TRL."""
    (tmp_path / "trl" / "trainer").mkdir(parents=True)
    for name in ("__init__.py", "trainer/__init__.py", "trainer/dpo_trainer.py"):
        (tmp_path / "trl" / name).touch()
    (tmp_path / "import_trl.py").write_text("import trl.trainer.dpo_trainer")
    done = run("--only", "openrlhf", tmp_path / "import_trl.py")
    assert done.returncode == 0
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
        (
            ("no/such.py",),
            "fastdpo run: command must be a script, -m and a module, or a command on PATH; got 'no/such.py', which "
            "does not exist\n",
        ),
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
    done = run("--verify", "--strict", tmp_path / "planted.py", tmp_path / "out", warm=True)
    assert done.returncode == 1
    assert "VerificationError: fastdpo: trl.DPOTrainer (policy): the fused path differs" in done.stderr
    (tmp_path / "strict.py").write_text("import os; print(os.environ['FASTDPO_STRICT'])")
    assert run("--strict", tmp_path / "strict.py").stdout == "1\n"
