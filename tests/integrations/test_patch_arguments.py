"""Arguments of `patch()`: those that it takes, and an error at once for all others."""

import inspect
import math
import subprocess
import sys

import numpy as np
import pytest
from trl import DPOTrainer, KTOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer

import fastdpo
from fastdpo.__main__ import parser, subparsers
from fastdpo.commands import run
from fastdpo.integrations.options import OPTIONS, GivenOptions, PatchOptions
from tests.support import ROOT

ALL = ["trl.DPOTrainer", "trl.OnlineDPOTrainer", "trl.KTOTrainer", "trl.RewardTrainer"]


def names(report: fastdpo.PatchReport) -> list[str]:
    return [seam.name for seam in report.seams]


@pytest.mark.parametrize(
    ("targets", "patched"),
    [
        ((DPOTrainer,), ALL[:1]),
        ((OnlineDPOTrainer, KTOTrainer), ALL[1:3]),
        (([DPOTrainer, "trl.KTOTrainer"],), [ALL[0], ALL[2]]),
        ((("trl.DPOTrainer",),), ALL[:1]),
        (({"trl.DPOTrainer"}, KTOTrainer), [ALL[0], ALL[2]]),
        ((), ALL),
    ],
)
def test_targets(targets, patched):
    assert names(fastdpo.patch(*targets)) == patched


def test_a_list_with_a_package():
    assert names(fastdpo.patch(["trl"])) == names(fastdpo.patch("trl"))
    with fastdpo.patched([DPOTrainer]) as report:
        assert names(report) == ALL[:1]


class Subclass(DPOTrainer):
    pass


TARGETS = r"patch: targets must be among trl.DPOTrainer, .* or their packages, by name, or be trainer classes; got "


@pytest.mark.parametrize(
    ("target", "error", "got"),
    [
        ("trl.PPOTrainer", ValueError, "'trl.PPOTrainer'"),
        ("", ValueError, "''"),
        (Subclass, ValueError, rf"{Subclass.__module__}\.Subclass"),
        (str, ValueError, "builtins.str"),
        (None, TypeError, "None"),
        (3, TypeError, "3"),
        (["trl.DPOTrainer", b"trl"], TypeError, "b'trl'"),
        (pytest, TypeError, "a module"),
    ],
)
def test_other_targets(target, error, got):
    with pytest.raises(error, match=TARGETS + got):
        fastdpo.patch(target)


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        ("trl.DPOTrainr", "; did you mean trl.DPOTrainer?"),
        ("DPOTrainer", "; did you mean trl.DPOTrainer?"),
        ("openrlfh", "; did you mean openrlhf?"),
        ("axolotl", ", which trains with trl.DPOTrainer and trl.RewardTrainer"),
        ("???", ""),
    ],
)
def test_an_unknown_target_names_the_one_that_was_meant(target, advice):
    with pytest.raises(ValueError) as caught:
        fastdpo.patch(target)
    assert str(caught.value).endswith(f"or be trainer classes; got {target!r}{advice}")


@pytest.mark.parametrize(("option", "advice"), [("max_token", "; did you mean max_tokens?"), ("qqq", "")])
def test_an_unknown_option_names_the_one_that_was_meant(option, advice):
    with pytest.raises(TypeError) as caught:
        fastdpo.patch(**{option: 1})
    assert str(caught.value).startswith("patch: options must be among share_prompts, memory_budget, ")
    assert str(caught.value).endswith(f"; got {option}{advice}")


def test_the_signature_names_every_option():
    for function in (fastdpo.patch, fastdpo.patched):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == ["targets", *OPTIONS]
        assert list(GivenOptions.__annotations__) == [*OPTIONS]
        assert parameters["max_tokens"].default is None
        assert parameters["verify"].annotation == "bool"
        for name, type_ in GivenOptions.__annotations__.items():
            assert parameters[name].default == getattr(PatchOptions(), name)
            assert parameters[name].annotation in (type_.__forward_arg__, "bool | str")
        assert "changed" not in parameters


def test_every_option_is_explained_and_has_a_flag():
    """Where an option is declared, the command line reads its flags. `patch()` and two pages explain it."""
    patching = (ROOT / "docs" / "run.md").read_text()
    shown = " ".join(subparsers(parser())["run"].format_help().split())
    table = (ROOT / "docs" / "trl.md").read_text()
    for name, option in OPTIONS.items():
        assert f"\n        {name}: " in fastdpo.patch.__doc__
        assert f"\n| `{name}` | `{getattr(PatchOptions(), name)}` |" in table or name == "memory_budget"
        assert option.flags
        for flag, arguments in option.flags.items():
            words = [flag] if "const" in arguments else [flag, "1"]
            given = parser().parse_args(["run", *words, "train.py"])
            assert str(getattr(given, name)) == str(arguments.get("const", 1))
            assert arguments["help"] in shown
            assert f"\n| `{flag}" in patching


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_list_does_not_mean_all(empty):
    with pytest.raises(ValueError, match="patch: targets must not be empty; got"):
        fastdpo.patch(empty)


BYTES = "memory_budget must be a number of bytes, an int of 0 or more, or None; got "
SHARING = 'share_prompts must be True, False or "deterministic"; got '
TOKENS = 'max_tokens must be a positive integer, "auto" or None; got '
MALFORMED = [
    ("share_prompts", "no", ValueError, SHARING + "'no'"),
    ("share_prompts", None, TypeError, SHARING + "None"),
    ("share_prompts", 1, TypeError, SHARING + "1"),
    ("verify", "first", TypeError, "verify must be True or False; got 'first'"),
    ("verify", "trial", TypeError, "verify must be True or False; got 'trial'"),
    ("provisional", 0, TypeError, "provisional must be True or False; got 0"),
    ("provisional", None, TypeError, "provisional must be True or False; got None"),
    ("memory_budget", "1GiB", TypeError, BYTES + "'1GiB'"),
    ("memory_budget", -1, ValueError, BYTES + "-1"),
    ("memory_budget", math.nan, TypeError, BYTES + "nan"),
    ("memory_budget", math.inf, TypeError, BYTES + "inf"),
    ("memory_budget", 1e9, TypeError, BYTES + "1000000000.0"),
    ("memory_budget", True, TypeError, BYTES + "True"),
    ("max_tokens", 0, ValueError, TOKENS + "0"),
    ("max_tokens", "8192", TypeError, TOKENS + "'8192'"),
    ("max_tokens", "Auto", TypeError, TOKENS + "'Auto'"),
    ("max_tokens", 8192.0, TypeError, TOKENS + "8192.0"),
    ("max_tokens", True, TypeError, TOKENS + "True"),
]


@pytest.mark.parametrize(("option", "value", "error", "message"), MALFORMED)
def test_malformed_options(option, value, error, message):
    before = DPOTrainer.__init__
    with pytest.raises(error) as caught:
        fastdpo.patch(**{option: value})
    assert str(caught.value).startswith(f"patch: {message}")
    with pytest.raises(error), fastdpo.patched(**{option: value}):
        pass
    with pytest.raises(error) as caught:
        run.run([sys.executable], **{option: value})
    assert str(caught.value).startswith(f"run: {message}")
    assert DPOTrainer.__init__ is before


@pytest.mark.parametrize("budget", [0, 1 << 40, np.int64(5)])
def test_integers_of_any_kind_are_bytes(budget):
    fastdpo.patch(memory_budget=budget)
    fastdpo.patch(memory_budget=int(budget))  # the same options


@pytest.mark.parametrize("arguments", [("--memory-budget", "-1"), ("--max-tokens", "0")])
def test_the_command_line_checks_options_before_the_program_starts(arguments):
    command = [sys.executable, "-m", "fastdpo", "run", *arguments, "-m", "this"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"fastdpo run: {arguments[0][2:].replace('-', '_')} must be")
    assert done.stderr.count("\n") == 1
