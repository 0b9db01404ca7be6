"""Plots loss and margin of both sides, and the time of a step."""

from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks.demo.comparison import Measurements, column, warm

STOCK, FASTDPO, DOT = "#f2b880", "#1d3557", "#555555"


def draw_curves(axes: Axes, stock: Measurements, fastdpo: Measurements, name: str, label: str) -> None:
    """Draws TRL as a wide light line and fastdpo as a thin dark line on top."""
    steps = range(1, len(stock["steps"]) + 1)
    axes.plot(steps, column(stock, name), color=STOCK, linewidth=7, solid_capstyle="round", label="TRL")
    axes.plot(steps, column(fastdpo, name), color=FASTDPO, linewidth=1.4, marker=".", markersize=5, label="fastdpo")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)


def draw_seconds(axes: Axes, stock: Measurements, fastdpo: Measurements) -> None:
    """Draws a bar for the median and a dot for each step."""
    for x, (side, color) in enumerate(((stock, STOCK), (fastdpo, FASTDPO))):
        seconds = warm(column(side, "seconds"))
        middle = median(seconds)
        axes.bar(x, middle, width=0.6, color=color)
        spread = [x + 0.36 + 0.1 * (index % 3) / 2 for index in range(len(seconds))]
        axes.scatter(spread, seconds, s=12, color=DOT, alpha=0.6, linewidths=0, zorder=3)
        axes.annotate(f"{middle:.2f} s", (x, middle), xytext=(0, 4), textcoords="offset points", ha="center")
    axes.set_xticks([0, 1], ["TRL", "fastdpo"])
    axes.set_xlim(-0.5, 1.65)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bar: median; dots: steps")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def draw(stock: Measurements, fastdpo: Measurements, path: Path) -> None:
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    layout = [["loss", "seconds"], ["margin", "seconds"]]
    figure, axes = plt.subplot_mosaic(layout, figsize=(10, 5.4), width_ratios=[1.9, 1], layout="constrained")
    draw_curves(axes["loss"], stock, fastdpo, "loss", "loss")
    draw_curves(axes["margin"], stock, fastdpo, "margin", "margin")
    axes["margin"].sharex(axes["loss"])
    axes["loss"].tick_params(labelbottom=False)
    axes["loss"].legend(frameon=False)
    axes["margin"].set_xlabel("step")
    axes["margin"].xaxis.set_major_locator(MaxNLocator(integer=True))
    draw_seconds(axes["seconds"], stock, fastdpo)
    axes["loss"].set_title("Loss and reward margin", loc="left", fontweight="bold")
    axes["seconds"].set_title("Seconds per step", loc="left", fontweight="bold")
    figure.savefig(path, dpi=150)
    plt.close(figure)
