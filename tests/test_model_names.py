"""`check` and `doctor` take the same models, and refuse others at once and alike."""

import sys

import huggingface_hub.file_download
import pytest
from huggingface_hub import constants

import fastdpo.__main__
from fastdpo.commands.model_names import require_model

RULE = "model must be a directory with a config.json, or the name of a model on the Hugging Face Hub; got"
COMMANDS = {"check": ["--dataset", "pairs.jsonl", "--model"], "doctor": ["--model"]}


class Hub:
    """Has a file, has none, or cannot be reached.

    Attributes:
        found: what `file_exists` returns or raises.
        asked: the names and files that it was asked for.
    """

    def __init__(self):
        self.found, self.asked = False, []

    def file_exists(self, *asked: str) -> bool:
        self.asked.append(asked)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub, whose cache is empty."""
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "file_exists", hub.file_exists)
    monkeypatch.setattr(huggingface_hub.file_download, "HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return hub


@pytest.mark.parametrize(
    ("model", "reason", "times"),
    [
        ("no/model", "which is no directory, and the Hub has no config.json of that name", 1),
        ("path/to/model", "which is neither", 0),
        ("EMPTY", "which has none", 0),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_does_not_exist(command, model, reason, times, hub, tmp_path, monkeypatch):
    model = str(tmp_path) if model == "EMPTY" else model
    monkeypatch.setattr(sys, "argv", ["fastdpo", command, *COMMANDS[command], model])
    with pytest.raises(SystemExit) as raised:
        fastdpo.__main__.main()
    assert raised.value.code == f"fastdpo {command}: {RULE} {model!r}, {reason}"
    assert len(hub.asked) == times


def test_names_of_the_hub(hub, tmp_path):
    hub.found = True
    require_model("check", "someone/a-model")
    assert hub.asked == [("someone/a-model", "config.json")]
    hub.found = RuntimeError("no route to host")
    with pytest.raises(ValueError, match=r"check: model must .*, and the Hub cannot be asked: no route to host$"):
        require_model("check", "someone/a-model")
    saved = tmp_path / "hub" / "models--someone--a-model"
    (saved / "refs").mkdir(parents=True)
    (saved / "refs" / "main").write_text("0123")
    (saved / "snapshots" / "0123").mkdir(parents=True)
    (saved / "snapshots" / "0123" / "config.json").write_text("{}")
    require_model("check", "someone/a-model")
    assert len(hub.asked) == 2


def test_an_offline_hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"check: model must .*, and the Hub cannot be asked: .*HF_HUB_OFFLINE"):
        require_model("check", "someone/a-model-that-is-not-in-the-cache")
