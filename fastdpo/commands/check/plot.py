"""Draws the report of `fastdpo check`: each difference next to the one that rounding explains, and the costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from .command import Report
from .verdicts import OK

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STOCK, FASTDPO, WRONG = "#f2b880", "#1d3557", "#c1121f"
SMALLEST = 1e-17
"""Where differences of 0 are drawn."""


def draw(report: Report, path: Path) -> None:
    compared = [x for x in report.verdicts if x.fastdpo is not None and x.allowed is not None][::-1]
    layout: list[Any] = [["differences", f"cost {i}"] for i in range(len(report.costs))]
    height = 1.5 + 0.28 * len(compared)
    figure, axes = plt.subplot_mosaic(layout, figsize=(11, height), width_ratios=[2.2, 1], layout="constrained")
    differences = axes["differences"]
    for y, x in enumerate(compared):
        differences.plot([SMALLEST, x.allowed], [y, y], color=STOCK, linewidth=7, solid_capstyle="butt")
        color = FASTDPO if x.status == OK else WRONG
        differences.plot(max(x.fastdpo or 0, SMALLEST), y, color=color, marker="o", markersize=5)
    differences.set_yticks(range(len(compared)), [x.name for x in compared])
    differences.set_xscale("log")
    differences.set_xlabel("relative difference; bar: allowed, dot: fastdpo")
    differences.grid(axis="x", alpha=0.25)
    for i, cost in enumerate(report.costs):
        bars = axes[f"cost {i}"].barh(["fastdpo", "TRL"], [cost.fastdpo, cost.stock], color=[FASTDPO, STOCK])
        axes[f"cost {i}"].bar_label(bars, fmt=f"%.4g {cost.unit}", padding=3)
        axes[f"cost {i}"].set_title(cost.name, loc="left", fontsize="medium")
        axes[f"cost {i}"].margins(x=0.3)
        axes[f"cost {i}"].set_xticks([])
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle(report.title, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
