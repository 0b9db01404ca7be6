"""The notebook runs in a kernel of its own, with equal losses and fewer tokens, and prints what was committed."""

import os
import re

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
    sizes.source = sizes.source.replace("STEPS, PAIRS = 12, 6", "STEPS, PAIRS = 2, 2")
    place = {"metadata": {"path": ROOT}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "('trl.DPOTrainer', 'policy', 'fused'): 2" in printed
    stock, packed = (int(x.replace(",", "")) for x in re.findall(r"([\d,]+) (?:in TRL|with fastdpo)", printed)[:2])
    assert packed < stock
    assert float(re.search(r"difference of the loss: (\S+)", printed)[1]) < 1e-5
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert list(map(without_numbers, notebook.cells)) == list(map(without_numbers, committed.cells))


def without_numbers(cell) -> list[tuple[str, str, set[str]]]:
    """The type, the text and the formats of each output of a cell."""
    return [
        (output.output_type, re.sub(r"\d[\d.,e+-]*", "0", output.get("text", "")), {*output.get("data", ())})
        for output in cell.get("outputs", ())
    ]
