"""The command line: every command explains itself, and starts without torch."""

import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

import fastdpo
from fastdpo import __main__
from fastdpo.__main__ import INTERRUPTED, parsed, parser, subparsers

COMMANDS = subparsers(parser())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_an_example_that_parses(name):
    prefix, example = COMMANDS[name].epilog.split(": ", 1)
    assert prefix == "example"
    program, *arguments = shlex.split(example)
    assert program == "fastdpo"
    assert parsed(arguments).command == name


def test_version(capsys):
    with pytest.raises(SystemExit):
        parsed(["--version"])
    assert capsys.readouterr().out == f"fastdpo {fastdpo.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--verfy", "train.py"], "unrecognized arguments: --verfy; did you mean --verify?"),
        (["run", "--maxtokens", "9", "train.py"], "unrecognized arguments: --maxtokens; did you mean --max-tokens?"),
        (
            ["run", "--max-tokens", "1.5", "x.py"],
            "--max-tokens: must be a positive integer, own, auto or none; got '1.5'\n",
        ),
        (["doctor", "--jsno"], "unrecognized arguments: --jsno; did you mean --json?"),
        (["doctor", "--qqq"], "unrecognized arguments: --qqq\n"),
    ],
)
def test_a_wrong_option_names_what_was_meant(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parsed(arguments)
    assert message in capsys.readouterr().err


def test_every_public_name_is_found():
    for name in fastdpo.__all__:
        assert getattr(fastdpo, name) is getattr(fastdpo, name)
    assert set(fastdpo.__all__) <= set(dir(fastdpo))
    assert fastdpo.ops is sys.modules["fastdpo.ops"]
    with pytest.raises(AttributeError, match="module 'fastdpo' has no attribute 'patches'"):
        fastdpo.patches  # noqa: B018


START = """
import os, runpy, sys

def modules(*command):
    heavy = {"torch", "numpy", "transformers", "trl", "triton", "peft", "datasets", "accelerate"}
    print(sorted(heavy & sys.modules.keys()))
    sys.stdout.flush()
    os._exit(0)

os.execv = modules
try:
    runpy.run_module("fastdpo", run_name="__main__", alter_sys=True)
except SystemExit:
    modules()
"""
RUN = ("run", "--verify", "--max-tokens", "9", "--only", "trl", __file__)


MODEL = ("--model", "path/to/no/model")
REFUSED = [("check", *MODEL, "--dataset", "x"), ("doctor", *MODEL)]


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), *((x, "--help") for x in COMMANDS), RUN, *REFUSED],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_command_starts_without_torch(arguments, tmp_path):
    """Up to its help, up to the program that `fastdpo run` executes, or up to the error for a model that does not
    exist. Importing torch takes seconds.
    """
    done = subprocess.run(
        [sys.executable, "-c", START, *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("name", ["check", "doctor"])
def test_ctrl_c_ends_a_command_with_one_line(name, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("fastdpo.__main__.require_model", interrupted)
    with pytest.raises(SystemExit) as ended:
        __main__.main(shlex.split(COMMANDS[name].epilog)[2:])
    assert ended.value.code == INTERRUPTED == 130
    assert capsys.readouterr() == ("", f"fastdpo {name}: interrupted\n")


@pytest.mark.parametrize("name", ["check", "doctor"])
def test_a_missing_package_ends_a_command_with_one_line(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SystemExit, match=f"^fastdpo {name}: requires packages that .*: .*huggingface_hub"):
        __main__.main(shlex.split(COMMANDS[name].epilog)[2:])


@pytest.mark.thorough
def test_ctrl_c_ends_a_check_and_its_run(tmp_path):
    """The terminal sends SIGINT to both processes."""
    command = [sys.executable, "-m", "fastdpo", "check", "--tiny"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    as_in_a_terminal = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=as_in_a_terminal,
    ) as check:
        deadline = time.monotonic() + 120
        while not [*tmp_path.glob("fastdpo-check-*/*.log")]:  # the first run has been started
            assert check.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(check.pid, signal.SIGINT)
        out, err = check.communicate(timeout=60)  # until no process has its pipes, which its run inherits
    assert (check.returncode, out) == (INTERRUPTED, "")
    assert err.splitlines()[-1] == "fastdpo check: interrupted"
    assert "Traceback" not in err
    assert not [*tmp_path.glob("fastdpo-check-*")]
