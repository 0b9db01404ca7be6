"""Plots of a run's JSON as small SVG files, the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, StrMethodFormatter

from benchmarks.cases import SUBJECT

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
    """Time of every side divided by fastdpo's, with intervals; a side without a measurement is named in its place."""
    cases = result["cases"]
    sides = names_of_sides(cases)
    sides = [side for side in sides if any(case["sides"].get(side, {}).get("samples") for case in cases)]
    color, height = colors(sides), 0.8 / max(len(sides), 1)
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.16 * len(cases) * (len(sides) + 1)), layout="constrained")
    labelled: set[str] = set()
    for row, case in enumerate(cases):
        summary = result["summary"]["cases"][case["name"]]
        for i, side in enumerate(sides):
            place = row + i * height
            if side not in summary["seconds"] or SUBJECT not in summary["seconds"]:
                missing = side if side not in summary["seconds"] else SUBJECT
                status = case["sides"].get(missing, {}).get("status", "not run")
                axes.annotate(
                    f"{missing}: {status}", (1, place), (4, 0), textcoords="offset points", fontsize=7, va="center"
                )
                continue
            ratio = summary["times_fastdpo"].get(side, {"value": 1.0, "low": None, "high": None})
            interval = None
            if ratio["low"] is not None:
                interval = [[max(ratio["value"] - ratio["low"], 0)], [max(ratio["high"] - ratio["value"], 0)]]
            label = None if side in labelled else side
            bar = {"color": color[side], "label": label, "xerr": interval, "error_kw": {"lw": 0.7}}
            axes.barh(place, ratio["value"], height, **bar)
            labelled.add(side)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(cases))], [case["name"] for case in cases])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.6)
    axes.set_xlabel("time relative to fastdpo (ratio of medians, 95 % interval)")
    axes.set_title(result["title"], loc="left", fontsize=10)
    if axes.containers:
        figure.legend(loc="outside lower center", ncols=3)


def draw_lines(axes: Axes, lines: dict[str, list[tuple[float, float]]], x: str, y: str) -> None:
    color = colors(list(lines))
    for name, points in lines.items():
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, color=color[name], label=name)
    places = sorted({place for points in lines.values() for place, _ in points})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks(places, [f"{place:,.0f}" for place in places], rotation=30)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)


def memory(result: Result) -> None:
    """Peaks of each side as the batch grows, and by the knob."""
    groups = list(dict.fromkeys(case["group"] for case in result["cases"]))
    _, panels = plt.subplots(1, len(groups), figsize=(3.2 * len(groups), 3), layout="constrained", squeeze=False)
    for axes, group in zip(panels[0], groups, strict=True):
        cases = [case for case in result["cases"] if case["group"] == group]
        lines: dict[str, list[tuple[float, float]]] = {}
        for case in cases:
            for side, peak in result["summary"]["cases"][case["name"]]["peak_bytes"].items():
                if group == "knob":
                    budget = case["sides"][side]["options"]["memory_budget"] / MIB
                    lines.setdefault(case["name"], []).append((budget, peak / MIB))
                else:
                    lines.setdefault(side, []).append((case["facts"]["x"], max(peak, 1) / MIB))
        x = "memory_budget, MiB" if group == "knob" else f"{group}: {cases[0]['facts']['x_name']}"
        draw_lines(axes, lines, x, "peak, MiB")
        if group == "knob":
            axes.set_xscale("linear")
            axes.set_xticks(sorted({place for points in lines.values() for place, _ in points}))
            axes.set_yscale("linear")
            axes.set_ylim(bottom=0)
        if lines:
            axes.legend(fontsize=7)


def scaling(result: Result) -> None:
    """Median time along each axis, with the fitted exponent."""
    cases = result["cases"]
    _, panels = plt.subplots(1, len(cases), figsize=(2.6 * len(cases), 2.6), layout="constrained", squeeze=False)
    for axes, case in zip(panels[0], cases, strict=True):
        medians = result["summary"]["cases"][case["name"]]["seconds"]
        points = [(case["facts"]["x"][name], estimate["value"]) for name, estimate in medians.items()]
        draw_lines(axes, {SUBJECT: points}, case["facts"]["x_name"].split(",")[0], "seconds")
        fit = result["summary"]["exponents"].get(case["name"])
        axes.set_title(case["name"] + ("" if fit is None else f": power {fit['value']:.2f}"), fontsize=9)


PLOTS = {"memory": memory, "scaling": scaling}
"""Of suites that are not drawn as `bars`."""


def plot(result: Result, path: Path) -> None:
    with plt.rc_context(STYLE):
        PLOTS.get(result["suite"], bars)(result)
        path.parent.mkdir(parents=True, exist_ok=True)
        plt.savefig(path, metadata={"Date": None})
        plt.close()
