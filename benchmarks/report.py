"""Updates docs/results.md, docs/gpu.md and the first picture of README from the committed results.

    python -m benchmarks.report
    python -m benchmarks.report --site PATH

Pages contain generated text between markers such as `<!-- benchmarks:begin -->` and `<!-- benchmarks:end -->`. With
`--site`, it writes the page of all suites, which `make site` adds to the documentation.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import accuracy, plots, programs, tables
from benchmarks.suites import SUITES

ROOT = Path(__file__).parents[1]
RESULTS_PAGE = ROOT / "docs" / "results.md"
GPU_PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "benchmarks" / "results"
GPU_RESULTS = RESULTS / "gpu"
TRAININGS = GPU_RESULTS / "trainings.json"
PICTURES = ROOT / "docs" / "plots"
BEGIN, END = "<!-- {}:begin -->", "<!-- {}:end -->"
HEADER = """# Benchmarks

Written from [benchmarks/results](../benchmarks/results), which holds every sample. [How much faster?](results.md)
says how they were measured. Parentheses hold 95 % bootstrap intervals. TRL as shipped is timed where nothing else
compares alike, and in the suite `step`: on a CPU it scores every position, which it does not on a GPU.

## Overview

Geometric means over the cases of a suite. If a side was not measured in some cases, the cell says in
how many it was, and names the missing ones."""
SIDES = """## Sides

What the sides of whole trainers run. Other sides are explained below their tables."""
OF_TRAINERS = SUITES["step"].descriptions
OTHERS = {
    "demo": tables.demo_table,
    "programs": programs.table,
    "profile": tables.profile_table,
    "accuracy": accuracy.table,
}
"""Results that are no suites, and the tables that docs/results.md has of them between markers of their names."""

Result = dict[str, Any]


def results(directory: Path = RESULTS) -> dict[str, Result]:
    """The committed results by suite.

    Raises:
        ValueError: a file comes from a quick run.
    """
    paths = {name: directory / f"{name}.json" for name in SUITES}
    by_suite = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    for name, result in by_suite.items():
        if result["quick"]:
            raise ValueError(f"report: {name}.json must come from a full run; it was made with --quick")
    return by_suite


def section(result: Result, level: str) -> str:
    """Heading, table, sides, machine and versions of a suite."""
    own = SUITES[result["suite"]].descriptions.items() - OF_TRAINERS.items()
    sides = tables.sides_list(result, dict(own))
    parts = [f"{level} {result['title']}", tables.table(result), sides, tables.where(result)]
    return "\n\n".join(filter(None, parts))


def page(by_suite: dict[str, Result], on_gpu: dict[str, Result]) -> str:
    """The page of all suites."""
    sections = [section(result, "##") for result in by_suite.values()]
    sections += ["## On a GPU", *(section(result, "###") for result in on_gpu.values())]
    of_trainers = "\n".join(tables.bullet(f"**{name}**: {text}") for name, text in OF_TRAINERS.items())
    return "\n\n".join([HEADER, tables.overview(by_suite), f"{SIDES}\n\n{of_trainers}", *sections]) + "\n"


def fill(text: str, content: str, name: str = "benchmarks") -> str:
    """Replaces what stands between the markers of a page.

    Raises:
        ValueError: the page has no markers.
    """
    first, last = BEGIN.format(name), END.format(name)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"report: a page must contain {first} and {last}; they are missing")
    return f"{before}{first}\n{content}\n{last}{after}"


def results_page(text: str, by_suite: dict[str, Result], directory: Path = RESULTS) -> str:
    """The text of docs/results.md, given that of now."""
    others = {name: json.loads((directory / f"{name}.json").read_text()) for name in OTHERS}
    text = fill(text, tables.speedups_table(by_suite))
    for name, table in OTHERS.items():
        text = fill(text, table(others[name]), name)
    return text


def gpu_page(text: str, on_gpu: dict[str, Result], trainings: Result) -> str:
    """The text of docs/gpu.md, given that of now."""
    text = fill(text, tables.gpu_table(on_gpu["step"]))
    return fill(text, tables.trainings_table(trainings), "trainings")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--site", type=Path, metavar="PATH", help="write the page of all suites there instead")
    path, by_suite, on_gpu = parser.parse_args(argv).site, results(), results(GPU_RESULTS)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(by_suite, on_gpu))
        return
    RESULTS_PAGE.write_text(results_page(RESULTS_PAGE.read_text(), by_suite))
    GPU_PAGE.write_text(gpu_page(GPU_PAGE.read_text(), on_gpu, json.loads(TRAININGS.read_text())))
    for theme in plots.THEMES:
        plots.plot_first_picture(by_suite["step"], PICTURES / f"first-{theme}.svg", theme)


if __name__ == "__main__":
    main()
