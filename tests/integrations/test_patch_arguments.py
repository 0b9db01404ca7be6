"""Arguments of `patch()`: those that it takes, and an error at once for all others."""

import inspect
import math
import pydoc
import sys

import pytest
from trl import DPOTrainer, KTOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer

import fastdpo
from fastdpo.__main__ import parser, subparsers
from fastdpo.commands import run
from fastdpo.integrations.options import PatchOptions
from tests.support import ROOT

ALL = [f"trl.{x}Trainer" for x in ["DPO", "OnlineDPO", "KTO", "Reward", "GRPO", "RLOO", "CPO", "ORPO", "A2PO", "TPO"]]


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
    assert names(report := fastdpo.patch(["trl"])) == names(fastdpo.patch("trl"))
    assert {*ALL, "trl.SFTTrainer"} == {seam.name for seam in report.seams if seam.on}
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


@pytest.mark.parametrize("function", [fastdpo.patch, fastdpo.patched])
def test_an_unknown_option_is_named(function):
    with pytest.raises(TypeError, match=r"patch(ed)?\(\) got an unexpected keyword argument 'max_token'"):
        function(max_token=1)


def test_signatures_have_the_options_and_their_defaults():
    for function in (fastdpo.patch, fastdpo.patched):
        targets, *options = inspect.signature(function).parameters.values()
        assert targets.name == "targets"
        assert {x.name: x.default for x in options} == PatchOptions()._asdict()
        assert [x.name for x in options] == [*PatchOptions._fields]
        assert {x.name: x.annotation for x in options} == {
            name: PatchOptions.__annotations__[name].__forward_arg__ for name in PatchOptions._fields
        }


def test_help_fits_on_a_screen():
    lines = pydoc.render_doc(fastdpo.patch, renderer=pydoc.plaintext).splitlines()
    assert sum(max(1, math.ceil(len(line) / 100)) for line in lines) <= 40


def test_every_option_is_explained_and_has_a_flag():
    page = (ROOT / "docs" / "options.md").read_text()
    shown = " ".join(subparsers(parser())["run"].format_help().split())
    for name, default in PatchOptions()._asdict().items():
        flag = f"--{'no-' if default is True else ''}{name.replace('_', '-')}"
        assert f"\n        {name}: " in fastdpo.patch.__doc__
        assert f"\n| `{name}` | `{default}` | `{flag}` |" in page
        assert flag in shown
        words = [flag, "1"] if name == "max_tokens" else [flag]
        assert getattr(parser().parse_args(["run", "train.py"]), name) == default
        assert getattr(parser().parse_args(["run", *words, "train.py"]), name) != default


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_list_does_not_mean_all(empty):
    with pytest.raises(ValueError, match="patch: targets must not be empty; got"):
        fastdpo.patch(empty)


TOKENS = 'max_tokens must be a positive integer, "own", "auto" or None; got '
MALFORMED = [
    ("share_prompts", "no", TypeError, "share_prompts must be True or False; got 'no'"),
    ("share_prompts", None, TypeError, "share_prompts must be True or False; got None"),
    ("compile", 1, TypeError, 'compile must be True, False or "auto"; got 1'),
    ("compile", "Auto", TypeError, "compile must be True, False or \"auto\"; got 'Auto'"),
    ("verify", "first", TypeError, "verify must be True or False; got 'first'"),
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
        run.run([sys.executable], options=PatchOptions(**{option: value}))
    assert str(caught.value).startswith(f"run: {message}")
    assert DPOTrainer.__init__ is before
