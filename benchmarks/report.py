"""Brings README.md's overview, docs/benchmarks.md, docs/gpu.md and docs/plots up to the results that are committed.

    python -m benchmarks.report

The overview, and the tables of a GPU, stand between `<!-- benchmarks:begin -->` and `<!-- benchmarks:end -->`;
docs/benchmarks.md is made whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import plots, tables
from benchmarks.suites import SUITES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
GPU_RESULTS = RESULTS / "gpu"
PAGE = ROOT / "docs" / "benchmarks.md"
GPU_PAGE = ROOT / "docs" / "gpu.md"
PLOTS = ROOT / "docs" / "plots"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
HEADER = """# Benchmarks

Made by `python -m benchmarks.report` from [benchmarks/results](../benchmarks/results), which has every sample; a test
says when it is stale. `make bench` measures again. All sides of a case take turns, each in a process of its own; before
a side is timed, its numbers are checked against float64, and one that is wrong gets no time. Brackets hold 95 %
bootstrap intervals. What each suite is made of: [benchmarks/suites](../benchmarks/suites)."""
OVERVIEW = """## Overview

Geometric means over the cases of a suite. A mean that lacks a case, because one of its two sides failed there, says
which."""


def results(directory: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The committed runs of suites, by suite.

    Raises:
        ValueError: one comes from a quick run.
    """
    paths = {name: directory / f"{name}.json" for name in SUITES}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    for name, result in found.items():
        if result["quick"]:
            raise ValueError(f"report: {name}.json must come from a full run; it was made with --quick")
    return found


def section(result: dict[str, Any], level: str) -> str:
    """One suite's heading, table and circumstances."""
    return f"{level} {result['title']}\n\n{tables.table(result)}\n\n{tables.where(result)}"


def page(found: dict[str, dict[str, Any]]) -> str:
    """docs/benchmarks.md"""
    sections = [f"{section(result, '##')}\n\n![{result['title']}](plots/{name}.svg)" for name, result in found.items()]
    return "\n\n".join([HEADER, OVERVIEW, tables.overview(found), *sections]) + "\n"


def on_gpu(found: dict[str, dict[str, Any]]) -> str:
    """What docs/gpu.md shows of the results of a GPU."""
    return "\n\n".join(section(result, "###") for result in found.values()) or "Nothing yet."


def filled(text: str, content: str) -> str:
    """A text with the content between its markers.

    Raises:
        ValueError: it has none.
    """
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found_begin or not found_end:
        raise ValueError(f"report: a page must hold {BEGIN} and {END}; they are missing")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def main() -> None:
    found = results()
    README.write_text(filled(README.read_text(), tables.readme_table(found)))
    GPU_PAGE.write_text(filled(GPU_PAGE.read_text(), on_gpu(results(GPU_RESULTS))))
    PAGE.write_text(page(found))
    for name, result in found.items():
        plots.plot(result, PLOTS / f"{name}.svg")
    pages = ", ".join(str(path.relative_to(ROOT)) for path in (README, PAGE, GPU_PAGE, PLOTS))
    print(f"{pages}: {', '.join(found) or 'no results yet'}")


if __name__ == "__main__":
    main()
