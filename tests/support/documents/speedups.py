"""README's table of speedups and the row of docs/trl-integration.md, from the committed results:

python -m tests.support.documents.speedups
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cases import SUBJECT
from benchmarks.report import GPU_RESULTS, RESULTS, fill
from benchmarks.suites.step import AUTO, GRAPHS_OF_COMPILED, LABELLED, LAYERS_COMPILED, PROFILES, STOCK
from tests.support import ROOT

PAGE, FOR_TRL = ROOT / "README.md", ROOT / "docs" / "trl-integration.md"
NAME = "speedups"
DATASETS = "HH", "UltraFeedback", "Capybara"
"""In the order of the lengths of their rows."""
CPU, GPU = RESULTS / "step.json", GPU_RESULTS / "step.json"
ROWS: tuple[tuple[Path, str, str, str, str], ...] = (  # result, group, side, side of TRL, what is trained how
    (CPU, "full", SUBJECT, LABELLED, "21M, full fine-tuning"),
    (GPU, "0.5B, full", SUBJECT, STOCK, "0.5B, full fine-tuning"),
    (GPU, "0.5B, full", AUTO, STOCK, "0.5B, full fine-tuning, `patch()` alone"),
    (GPU, "0.5B, full", GRAPHS_OF_COMPILED, STOCK, "0.5B, full fine-tuning, compiled layers and CUDA graphs"),
    (GPU, "8B, LoRA, checkpointing", SUBJECT, STOCK, "8B, LoRA"),
    (GPU, "8B, LoRA, checkpointing", LAYERS_COMPILED, STOCK, "8B, LoRA, compiled layers"),
)


def device(result: dict[str, Any]) -> str:
    machine, dtype = result["machine"], result["cases"][0]["facts"]["dtype"].partition(" ")[0]
    name = machine.get("accelerator") or f"{machine['threads']} CPU cores, {machine['cpu']}"
    return f"{name}, {dtype}"


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


def row() -> str:
    """Seconds, and peak memory next to the weights, of one step of a large model."""
    result, case = json.loads(GPU.read_text()), "8B, LoRA, checkpointing/UltraFeedback"
    summary = result["summary"]["cases"][case]
    cells = [
        f"{summary['seconds'][side]['value']:.2f} s, {summary['peak_bytes'][side] / 2**30:.1f} GiB"
        for side in (STOCK, SUBJECT)
    ]
    what = f"DPO step of 8 pairs of UltraFeedback's lengths, 8B with LoRA, {device(result)}"
    return f"| | TRL | with fastdpo |\n| --- | --- | --- |\n| {what} | {' | '.join(cells)} |"


def pages() -> dict[Path, str]:
    """The text of each page, given that of now."""
    return {PAGE: fill(PAGE.read_text(), table(), NAME), FOR_TRL: fill(FOR_TRL.read_text(), row(), "row")}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
