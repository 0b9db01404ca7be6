"""Copies of an installed package that have a newer version, and some of them other code, and trainings with them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import fastdpo
from fastdpo.integrations.admission import tested_code
from fastdpo.integrations.admission.versions import DISTRIBUTIONS
from fastdpo.integrations.registry import ENTRIES
from fastdpo.integrations.trl.max_tokens import budget
from tests.support.comparison import assert_same_training
from tests.support.documents import tested_code as recording

Change = tuple[str, str, str]
"""A file of the package, a text in it, and what replaces the text."""


class Copy(NamedTuple):
    """A copy of a package, and the trainer that trains with it."""

    trainer: str
    changes: list[Change]


def make_copy(package: str, version: str, changes: list[Change], directory: Path) -> None:
    """Copies an installed package and its compiled files into a directory, with the metadata of a version."""
    source = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    shutil.copytree(source, directory / package)
    for file, text, replacement in changes:
        path = directory / package / file
        assert text in path.read_text(), (file, text)
        path.write_text(path.read_text().replace(text, replacement))
    distribution = DISTRIBUTIONS.get(package, package)
    metadata = directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def train_copies(version: str, copies: Mapping[str, Copy], directory: Path) -> dict[str, dict[str, Any]]:
    """The results of `workers.newer_copies` by the names of the copies.

    They are the runs "stock" and "patched", the "report" on the trainer, and the "messages" that were logged.
    """
    arguments = []
    for name, (trainer, changes) in copies.items():
        make_copy(trainer.partition(".")[0], version, changes, directory / name.replace(" ", "_"))
        arguments += [trainer, str(directory / name.replace(" ", "_"))]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    worker = [sys.executable, "-m", "tests.support.workers.newer_copies", *arguments]
    subprocess.run(worker, env=path, check=True, timeout=600)
    results = {}
    for name in copies:
        result = torch.load(directory / name.replace(" ", "_") / "result.pt", weights_only=False)
        runs = {side: SimpleNamespace(**result[side], in_float64=None) for side in ("stock", "patched")}
        results[name] = {**result, **runs}
    return results


def train_program(
    trainer: str, version: str, changes: Mapping[str, list[Change]], directory: Path
) -> dict[str, dict[str, Any]]:
    """The results of `train_copies` for copies of one trainer's package, by the names of their changes."""
    return train_copies(version, {name: Copy(trainer, each) for name, each in changes.items()}, directory)


def assert_reported_and_trained(result: Mapping[str, Any], report: str) -> None:
    """Asserts what the report says of a trainer, and that it trains what its stock trains: fused if it is on."""
    assert result["report"] == report
    assert_trains_as_its_stock(result, fused=": on" in report)


def assert_recorded(prefix: str = "") -> None:
    """Asserts that tested_code.json has what lines rely on in the installed packages, names with a prefix among it."""
    found = recording.found()
    assert any(name.startswith(prefix) for name in found), "no tested version is installed"
    assert found == {name: tested_code.hashes().get(name) for name in found}, recording.__doc__


def assert_changes_are_noticed(monkeypatch: pytest.MonkeyPatch, trainer: str, option: str) -> None:
    """Plants a change in each function that an option of a trainer relies on, in a newer version of its package.

    Asserts that the trainer is patched without the option, with one warning that names the function.
    """
    warned: list[str] = []
    monkeypatch.setattr(budget, "warn", warned.append)
    line = next(entry for entry in ENTRIES if entry.trainer == trainer).load()
    for name in tested_code.code_of(line, line.cutting.relies_on):
        with monkeypatch.context() as changing:
            set_newer(changing, name.partition(".")[0])
            change(changing, name)
            warned.clear()
            evaluate = line.trainer_class().evaluate
            assert fastdpo.patch(trainer, max_tokens=500).seams[0].on
            named = rf"{re.escape(name)}\b.*, on which {option} relies .*changed-code"
            assert len(warned) == 1
            assert re.match(rf"{trainer}: keeps the batches of TRL, .*{named}", warned[0])
            assert line.trainer_class().evaluate is evaluate, "which is replaced with the option"
            fastdpo.unpatch()


def set_newer(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Gives a package, as it is, a version that is newer than any."""
    version, newer = importlib.metadata.version, DISTRIBUTIONS.get(package, package)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0" if name == newer else version(name))


def change(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes functions, given by the ends of their full names, differ from those that are recorded."""
    recorded = {name: "" if name.endswith(names) else x for name, x in tested_code.hashes().items()}
    monkeypatch.setattr(tested_code, "hashes", lambda: recorded)


def assert_trains_as_its_stock(result: Mapping[str, Any], *, fused: bool) -> None:
    """Asserts that a copy trains what its stock trains: up to rounding if it is fused, else to the last bit."""
    stock, patched = result["stock"], result["patched"]
    assert len(stock.gradients) == len(patched.gradients) > 0
    assert {path for _, path in patched.calls} == ({"fused"} if fused else set())
    if fused:
        assert_same_training(stock, patched)
        return
    for a, b in zip(stock.gradients, patched.gradients, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
