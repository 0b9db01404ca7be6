"""The notebook runs in a kernel of its own, with equal losses and fewer tokens, and prints what was committed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.support import ROOT

# `make` installs them; an environment that was made by hand may be without.
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_runs(monkeypatch):
    """With fewer steps and pairs."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("FASTDPO_STRICT", "1")
    committed, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    (sizes,) = (cell for cell in notebook.cells if "STEPS, PAIRS = 12, 6" in cell.source)
    sizes.source = sizes.source.replace("STEPS, PAIRS = 12, 6", "STEPS, PAIRS = 3, 2")
    place = {"metadata": {"path": ROOT}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "('trl.DPOTrainer', 'policy', 'fused'): 3" in printed
    stock, packed = (int(x.replace(",", "")) for x in re.findall(r"([\d,]+) (?:in TRL|with fastdpo)", printed)[:2])
    assert packed < stock
    assert float(re.search(r"difference of the loss: (\S+)", printed)[1]) < 1e-5
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert list(map(without_numbers, notebook.cells)) == list(map(without_numbers, committed.cells))


def test_alone_it_installs_what_it_needs(monkeypatch, tmp_path):
    """As in Colab, which opens the notebook without the files around it."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone")
    first, *_ = (cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code")
    assert 'REPOSITORY = "' in first
    run, commands = subprocess.run, []

    def without_pip(command, **options):
        commands.append(command)
        return None if "pip" in command else run(command, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", without_pip)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = {}
    exec(re.sub(r'REPOSITORY = ".*"', f'REPOSITORY = "{ROOT}"', first), names)
    assert [command[:5] for command in commands[1:]] == [[sys.executable, "-m", "pip", "install", "--quiet"]]
    assert commands[1][5] == f"{tmp_path / 'fastdpo'}[bench]"
    assert names["ROOT"] == tmp_path / "fastdpo"
    assert (names["ROOT"] / "benchmarks" / "demo" / "preferences.jsonl").exists()
    assert sys.path[0] == str(names["ROOT"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["bench"]
    assert {"fastdpo[trl]", "matplotlib>=3.10"} <= {*extras}  # what the other cells import


def without_numbers(cell) -> list[tuple[str, str, set[str]]]:
    """The type, the text and the formats of each output of a cell."""
    return [
        (output.output_type, re.sub(r"\d[\d.,e+-]*", "0", output.get("text", "")), {*output.get("data", ())})
        for output in cell.get("outputs", ())
    ]
