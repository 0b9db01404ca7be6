"""README's table of speedups, from the committed results: `python -m tests.support.documents.speedups`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cases import SUBJECT
from benchmarks.report import GPU_RESULTS, RESULTS, fill
from benchmarks.suites.step import AUTO, GRAPHS_OF_COMPILED, LABELLED, LAYERS_COMPILED, PROFILES, STOCK
from tests.support import ROOT

PAGE = ROOT / "README.md"
NAME = "speedups"
DATASETS = "HH", "UltraFeedback", "Capybara"
"""In the order of the lengths of their rows."""
CPU, GPU = RESULTS / "step.json", GPU_RESULTS / "step.json"
ROWS: tuple[tuple[Path, str, str, str, str], ...] = (  # result, group, side, side of TRL, what is trained how
    (CPU, "full", SUBJECT, LABELLED, "Llama of 21M, float32"),
    (GPU, "0.5B, full", SUBJECT, STOCK, "0.5B, bfloat16"),
    (GPU, "0.5B, full", AUTO, STOCK, "0.5B, bfloat16, `patch()` alone"),
    (GPU, "0.5B, full", GRAPHS_OF_COMPILED, STOCK, "0.5B, compiled layers and CUDA graphs"),
    (GPU, "8B, LoRA, checkpointing", SUBJECT, STOCK, "8B, bfloat16, LoRA"),
    (GPU, "8B, LoRA, checkpointing", LAYERS_COMPILED, STOCK, "8B, LoRA, compiled layers"),
)


def device(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return machine.get("accelerator") or f"{machine['threads']} cores, {machine['cpu']}"


def ratios(result: dict[str, Any], case: str, side: str, of_trl: str) -> str:
    """TRL's time by fastdpo's and, where both were measured, TRL's peak memory next to the weights by fastdpo's."""
    summary = result["summary"]["cases"].get(case, {"seconds": {}})
    if side not in summary["seconds"]:
        return ""
    time = summary["seconds"][of_trl]["value"] / summary["seconds"][side]["value"]
    peaks = summary["peak_bytes"]
    return f"{time:.1f}x" + (f", {peaks[of_trl] / peaks[side]:.1f}x" if {side, of_trl} <= peaks.keys() else "")


def table() -> str:
    """A row for each model and machine that was measured, and a column for each dataset."""
    headers = [f"{name} ({PROFILES[name].median:,.0f})" for name in DATASETS]
    rows = [["on", "model", *headers], ["---"] * (2 + len(headers))]
    for path, group, side, of_trl, what in ROWS:
        result = json.loads(path.read_text())
        cells = [ratios(result, f"{group}/{name}", side, of_trl) for name in DATASETS]
        if any(cells):
            rows.append([device(result), what, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page() -> str:
    return fill(PAGE.read_text(), table(), NAME)


if __name__ == "__main__":
    PAGE.write_text(page())
