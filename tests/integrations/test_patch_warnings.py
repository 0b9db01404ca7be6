"""What `patch()` leaves stock is a warning, once, and an error with `FASTDPO_STRICT=1`."""

import ast
import gc
import importlib.metadata
import logging
import re
from pathlib import Path

import pytest
from trl import DPOTrainer

import fastdpo
from fastdpo.integrations.trl.online_dpo import OnlineDPOLine
from fastdpo.reasons import Reason
from tests.support.trl.dpo import build, tiny_model

ROOT = Path(__file__).parents[2]
CHANGED = Reason("different-code", difference="its forward has another parameter")


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, logger="fastdpo")

    def of_level(level: int) -> list[str]:
        return [record.message for record in caplog.records if record.levelno == level]

    return of_level


def change_online_dpo(monkeypatch) -> None:
    """As a release of TRL that changes the trainer."""
    monkeypatch.setattr(OnlineDPOLine, "unsupported_reason", lambda line: CHANGED)


def test_a_trainer_that_is_off_is_warned_about_once(monkeypatch, messages):
    change_online_dpo(monkeypatch)
    with fastdpo.patched() as first:
        pass
    with fastdpo.patched() as second:
        fastdpo.patch("trl.DPOTrainer")
    (warning,) = messages(logging.WARNING)
    assert warning == str(first) == str(second)
    assert re.match(r"fastdpo: trl\.DPOTrainer[\w, .]* \(1\.16\.0\): on \|", warning)
    assert f"trl.OnlineDPOTrainer (1.16.0): off, {CHANGED.named}" in warning
    assert len(messages(logging.INFO)) == 2
    fastdpo.unpatch()
    fastdpo.patch()
    assert len(messages(logging.WARNING)) == 2


def test_a_trainer_that_is_off_raises_in_strict_mode(monkeypatch, messages):
    change_online_dpo(monkeypatch)
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    before = DPOTrainer.__init__
    with pytest.raises(fastdpo.PatchError, match=rf"off, {CHANGED} .*\(FASTDPO_STRICT=1\)"):
        fastdpo.patch()
    assert DPOTrainer.__init__ is before
    assert all(seam.on for seam in fastdpo.patch("trl.DPOTrainer").seams)


def test_trainers_created_before_are_warned_about_once(tmp_path, messages):
    trainer = build(tmp_path, tiny_model(), tiny_model(seed=1))
    report = fastdpo.patch("trl.DPOTrainer")
    fastdpo.patch("trl.DPOTrainer")
    fastdpo.patch()
    (warning,) = messages(logging.WARNING)
    assert warning == str(report)
    assert warning.endswith("on; created before patch() and not patched: DPOTrainer")
    other = build(tmp_path / "other", tiny_model(), tiny_model(seed=1))
    fastdpo.unpatch()
    fastdpo.patch()
    assert len(messages(logging.WARNING)) == 2
    del trainer, other
    gc.collect()
    assert "created before" not in str(fastdpo.patch())


def test_trainers_created_before_raise_in_strict_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    before = DPOTrainer.__init__
    trainer = build(tmp_path, tiny_model(), tiny_model(seed=1))
    with pytest.raises(fastdpo.PatchError, match=r"created before patch\(\) and not patched: DPOTrainer .*STRICT=1"):
        fastdpo.patch()
    assert DPOTrainer.__init__ is before
    del trainer  # which is part of reference cycles
    fastdpo.patch()
    patched = build(tmp_path, tiny_model(), tiny_model(seed=1))
    assert "created before" not in str(fastdpo.patch())
    del patched


def test_no_package_at_all_is_a_warning_unless_one_is_named(monkeypatch, messages):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    fastdpo.patch()
    (warning,) = messages(logging.WARNING)
    assert re.match(r"fastdpo: trl\.DPOTrainer, [\w, .]*: off, trl is not installed \[not-installed\] \| ", warning)
    with pytest.raises(fastdpo.PatchError, match="not installed"):
        fastdpo.patch("trl.DPOTrainer")
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    with pytest.raises(fastdpo.PatchError, match="not installed"):
        fastdpo.patch()


LEVELS = ("warning", "warn", "error", "exception", "critical")


def test_every_warning_of_the_library_begins_with_its_name():
    """They are logged by `logs.warn`, which begins them so, apart from the report, which does itself."""
    others = []
    for path in sorted((ROOT / "fastdpo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or node.attr not in LEVELS:
                continue
            if ast.unparse(node.value) in ("logger", "logging", "warnings"):
                others.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)}")
    assert others == ["fastdpo/integrations/patching.py: logger.warning", "fastdpo/logs.py: logger.warning"]
    assert str(fastdpo.PatchReport(())).startswith("fastdpo: ")
