"""The first picture of README, drawn from the results of the suite `step`. Equal results give equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.cases import SUBJECT
from benchmarks.suites.step import LABELLED, STOCK
from benchmarks.tables import machine_of

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fastdpo",
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

Result = dict[str, Any]

THEMES = {
    "light": {"text": "#1f2328", "faint": "#818b98", "grid": "#d1d9e0", SUBJECT: "#0969da", LABELLED: "#d1602b"},
    "dark": {"text": "#e6edf3", "faint": "#8b949e", "grid": "#30363d", SUBJECT: "#58a6ff", LABELLED: "#f0883e"},
}
"""Colors on a page's own background, which the pictures leave transparent."""
ON_A_CPU = f"{STOCK} on a CPU, where it scores every position"


def first_picture(result: Result, theme: dict[str, str]) -> None:
    """Time and memory of a full fine-tuning step by dataset, on a logarithmic scale.

    A line joins the two sides that score the same positions, with their ratio. TRL as shipped is a faint circle.
    """
    cases = [case for case in result["cases"] if case["group"] == "full"]
    summaries = [result["summary"]["cases"][case["name"]] for case in cases]
    seconds = [{side: time["value"] for side, time in summary["seconds"].items()} for summary in summaries]
    gib = [{side: peak / (1 << 30) for side, peak in summary["peak_bytes"].items()} for summary in summaries]
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained", sharey=True)
    draw_pairs(panels[0], seconds, theme, "seconds per training step", (1, 2, 5, 10, 20, 50, 100))
    draw_pairs(panels[1], gib, theme, "peak memory above the model, GiB", (0.5, 1, 2, 5, 10))
    panels[0].set_yticks(range(len(cases)), [case["name"].rpartition("/")[2] for case in cases])
    panels[0].set_ylim(len(cases) - 0.5, -0.6)
    figure.suptitle(f"DPO step in TRL, full fine-tuning: {machine_of(result)}", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, handletextpad=0.2)


def draw_pairs(
    axes: Axes, rows: list[dict[str, float]], theme: dict[str, str], label: str, ticks: tuple[float, ...]
) -> None:
    for y, row in enumerate(rows):
        ours, theirs, shipped = (row[side] for side in (SUBJECT, LABELLED, STOCK))
        axes.plot([theirs, shipped], [y, y], color=theme["grid"], linewidth=1, zorder=1)
        axes.plot([ours, theirs], [y, y], color=theme[LABELLED], linewidth=4, alpha=0.35, zorder=1)
        middle, above = (ours * theirs) ** 0.5, y - 0.12
        axes.text(middle, above, f"{theirs / ours:.1f}x", ha="center", va="bottom", weight="bold", fontsize=8)
        marks = {"linestyle": "none", "marker": "o", "markersize": 7}
        names = (SUBJECT, LABELLED, ON_A_CPU) if y == 0 else ("", "", "")
        circle = marks | {"markersize": 5, "markerfacecolor": "none"}
        axes.plot(shipped, y, color=theme["faint"], label=names[2], **circle)
        axes.plot(theirs, y, color=theme[LABELLED], label=names[1], **marks)
        axes.plot(ours, y, color=theme[SUBJECT], label=names[0], **marks)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_title(label, loc="left", fontsize=10)
    axes.grid(axis="x", color=theme["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def plot_first_picture(result: Result, path: Path, name: str) -> None:
    """Writes the picture in one of the `THEMES`."""
    theme = THEMES[name]
    spines = {f"axes.spines.{side}": False for side in ("left", "bottom")}
    text = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), theme["text"])
    with plt.rc_context(STYLE | spines | text | {"savefig.transparent": True}):
        first_picture(result, theme)
        path.parent.mkdir(parents=True, exist_ok=True)
        plt.savefig(path, metadata={"Date": None})
        plt.close()
