"""`check` and `doctor` take the same models, and refuse others at once and alike."""

import sys
from types import SimpleNamespace

import huggingface_hub.utils
import pytest
from huggingface_hub import constants

import fastdpo.__main__
from fastdpo.commands.model_names import require_model

RULE = "model must be a directory with a config.json, or the name of a model on the Hugging Face Hub; got"
COMMANDS = {
    "check": ["--dataset", "pairs.jsonl", "--model"],
    "doctor": ["--model"],
}


class Hub:
    """Answers with a status, or not at all.

    Attributes:
        asked: the addresses that it was asked for.
    """

    def __init__(self, status: int | None):
        self.status, self.asked = status, []

    def head(self, url: str, **options):
        self.asked.append(url)
        if self.status is None:
            raise RuntimeError("no route to host")
        return SimpleNamespace(status_code=self.status)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub, whose cache is empty."""
    hub = Hub(404)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.file_download, "HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return hub


@pytest.mark.parametrize(
    ("model", "reason", "times"),
    [
        ("no/model", "which is no directory, and the Hub answers with the status 404", 1),
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


def test_names_of_the_hub(hub, tmp_path, monkeypatch):
    hub.status = 307
    require_model("check", "someone/a-model")
    assert hub.asked == ["https://huggingface.co/someone/a-model/resolve/main/config.json"]
    hub.status = None
    with pytest.raises(ValueError, match=r"check: model must .*, and the Hub cannot be reached: no route to host$"):
        require_model("check", "someone/a-model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no directory and not in the cache of the Hub \(HF_HUB_OFFLINE is set\)$"):
        require_model("check", "someone/a-model")
    saved = tmp_path / "hub" / "models--someone--a-model"
    (saved / "refs").mkdir(parents=True)
    (saved / "refs" / "main").write_text("0123")
    (saved / "snapshots" / "0123").mkdir(parents=True)
    (saved / "snapshots" / "0123" / "config.json").write_text("{}")
    require_model("check", "someone/a-model")
    assert len(hub.asked) == 2
