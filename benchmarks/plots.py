"""Plots of a run's JSON as small SVG files. Equal results give equal bytes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, StrMethodFormatter

from benchmarks.cases import SUBJECT
from benchmarks.suites.step import LABELLED, STOCK

COLORS = {SUBJECT: "#1d3557", "floor": "#9aa5b1"}
OTHERS = ("#f2b880", "#c9713f", "#7fa99b", "#b08ea2", "#8a8a5c")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fastdpo",
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
MIB = 1 << 20

Result = dict[str, Any]


def colors(names: list[str]) -> dict[str, str]:
    others = [name for name in names if name not in COLORS]
    return COLORS | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}


def names_of_sides(cases: list[Result]) -> list[str]:
    return list(dict.fromkeys(name for case in cases for name in case["sides"]))


def bars(result: Result) -> None:
    """Time of every side divided by fastdpo's, with intervals. Missing bars are labelled."""
    cases = result["cases"]
    sides = [side for side in names_of_sides(cases) if any(_samples(case, side) for case in cases)]
    color = colors(sides)
    shown = [[side for side in sides if side in case["sides"]] for case in cases]
    height = 0.9 + 0.16 * sum(len(names) + 1 for names in shown)  # inches: one unit of y is 0.16
    figure, axes = plt.subplots(figsize=(7, height), layout="constrained")
    ticks, y, in_legend = [], 0, set()
    for case, names in zip(cases, shown, strict=True):
        summary = result["summary"]["cases"][case["name"]]
        ticks.append(y + (len(names) - 1) / 2)
        for side in names:
            missing = next((name for name in (side, SUBJECT) if not _samples(case, name)), None)
            if missing is None:
                ratio = summary["times_fastdpo"].get(side, {"value": 1.0, "low": None, "high": None})
                interval = None
                if ratio["low"] is not None:
                    interval = [[max(ratio["value"] - ratio["low"], 0)], [max(ratio["high"] - ratio["value"], 0)]]
                label = None if side in in_legend else side
                in_legend.add(side)
                options = {"color": color[side], "label": label, "xerr": interval, "error_kw": {"lw": 0.7}}
                axes.barh(y, ratio["value"], 1, **options)
            else:
                note = f"{missing}: {case['sides'].get(missing, {}).get('status', 'not run')}"
                axes.annotate(note, (1, y), (4, 0), textcoords="offset points", fontsize=7, va="center")
            y += 1
        y += 1
    axes.set_yticks(ticks, [case["name"] for case in cases])
    axes.set_ylim(y - 1, -1)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_xlabel("time relative to fastdpo (ratio of medians, 95 % interval)")
    figure.suptitle(textwrap.fill(result["title"], 75), x=0.01, ha="left", fontsize=10)
    if axes.containers:
        figure.legend(loc="outside lower center", ncols=3)


def _samples(case: Result, side: str) -> bool:
    return bool(case["sides"].get(side, {}).get("samples"))


def draw_lines(axes: Axes, lines: dict[str, list[tuple[float, float]]], x_label: str, y_label: str) -> None:
    color = colors(list(lines))
    for name, points in lines.items():
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, color=color[name], label=name)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks], rotation=30)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)


def memory(result: Result) -> None:
    """Peak memory of each side by size, and by memory budget."""
    groups = list(dict.fromkeys(case["group"] for case in result["cases"]))
    _, panels = plt.subplots(1, len(groups), figsize=(3.2 * len(groups), 3), layout="constrained", squeeze=False)
    for axes, group in zip(panels[0], groups, strict=True):
        cases = [case for case in result["cases"] if case["group"] == group]
        lines: dict[str, list[tuple[float, float]]] = {}
        for case in cases:
            for side, peak in result["summary"]["cases"][case["name"]]["peak_bytes"].items():
                if group == "budget":
                    budget = case["sides"][side]["options"]["memory_budget"] / MIB
                    lines.setdefault(case["name"].rpartition("/")[2], []).append((budget, peak / MIB))
                else:
                    lines.setdefault(side, []).append((case["facts"]["x"], max(peak, 1) / MIB))
        x_label = "memory_budget, MiB" if group == "budget" else f"{group}: {cases[0]['facts']['x_name']}"
        draw_lines(axes, lines, x_label, "peak memory, MiB")
        if group == "budget":
            axes.set_xscale("linear")
            axes.set_xticks(sorted({budget for points in lines.values() for budget, _ in points}))
            axes.set_yscale("linear")
            axes.set_ylim(bottom=0)
        if lines:
            axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1))


def scaling(result: Result) -> None:
    """Median time along each axis, with the fitted exponent."""
    cases = result["cases"]
    _, panels = plt.subplots(1, len(cases), figsize=(2.6 * len(cases), 2.6), layout="constrained", squeeze=False)
    for axes, case in zip(panels[0], cases, strict=True):
        medians = result["summary"]["cases"][case["name"]]["seconds"]
        points = [(case["facts"]["x"][name], estimate["value"]) for name, estimate in medians.items()]
        draw_lines(axes, {SUBJECT: points}, case["facts"]["x_name"].split(",")[0], "seconds")
        fit = result["summary"]["exponents"].get(case["name"])
        axes.set_title(case["name"] + ("" if fit is None else f": exponent {fit['value']:.2f}"), fontsize=9)


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


PLOTS = {"memory": memory, "scaling": scaling}
"""Suites with a plot of their own; the others use `bars`."""


def plot(result: Result, path: Path) -> None:
    with plt.rc_context(STYLE):
        PLOTS.get(result["suite"], bars)(result)
        _save(path)


def plot_first_picture(result: Result, path: Path, name: str) -> None:
    """The first picture of README in one of the `THEMES`."""
    theme = THEMES[name]
    spines = {f"axes.spines.{side}": False for side in ("left", "bottom")}
    text = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), theme["text"])
    with plt.rc_context(STYLE | spines | text | {"savefig.transparent": True}):
        first_picture(result, theme)
        _save(path)


def _save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path, metadata={"Date": None})
    plt.close()
