"""Updates docs/results.md, docs/gpu.md, two pages of docs/notes (benchmarks.md and gpu.md), and docs/plots from the
committed results.

    python -m benchmarks.report

docs/notes/benchmarks.md is generated as a whole. The other pages contain generated text between the markers
`<!-- benchmarks:begin -->` and `<!-- benchmarks:end -->`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import plots, tables
from benchmarks.suites import SUITES

ROOT = Path(__file__).parents[1]
RESULTS_PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"
GPU_RESULTS = RESULTS / "gpu"
PAGE = ROOT / "docs" / "notes" / "benchmarks.md"
GPU_PAGE = ROOT / "docs" / "gpu.md"
GPU_NOTES = ROOT / "docs" / "notes" / "gpu.md"
PLOTS = ROOT / "docs" / "plots"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
HEADER = """# Benchmarks

Written by `python -m benchmarks.report` from [benchmarks/results](../../benchmarks/results), which
holds every sample. Each suite compares several sides on the same cases
([benchmarks/suites](../../benchmarks/suites)). The sides of a case take turns, each in its own process.
Before a side is timed, its numbers are compared with float64; an incorrect side gets no time.
Parentheses hold 95 % bootstrap intervals. TRL as shipped is timed where nothing else compares alike,
and in the suite `step`: on a CPU it scores every position, which it does not on a GPU.

## How to run

```bash
make bench                                    # every suite
make bench SUITES="step head" ARGS="--quick"  # two suites in tiny sizes, to check that they run
```

Results are written to `out/`. Copy them to `benchmarks/results` and run `python -m benchmarks.report`
to show them here. `python -m benchmarks.run --help` lists the options of a suite, among them `--cases`
for a part of it and `--resume` to continue a run. [gpu.md](gpu.md) says how to measure a GPU.

## Overview

Geometric means over the cases of a suite. If a side was not measured in some cases, the cell says in
how many it was, and names the missing ones."""
SIDES = """## Sides

What the sides of whole trainers run. Other sides are explained below their tables."""
OF_TRAINERS = SUITES["step"].descriptions

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


def page(by_suite: dict[str, Result]) -> str:
    """The text of docs/notes/benchmarks.md."""
    of_trainers = "\n".join(tables.bullet(f"**{name}**: {text}") for name, text in OF_TRAINERS.items())
    sections = (section(result, "##") for result in by_suite.values())
    return "\n\n".join([HEADER, tables.overview(by_suite), f"{SIDES}\n\n{of_trainers}", *sections]) + "\n"


def gpu_block(by_suite: dict[str, Result]) -> str:
    """The generated text of docs/notes/gpu.md."""
    return "\n\n".join(section(result, "###") for result in by_suite.values()) or "Nothing yet."


def fill(text: str, content: str) -> str:
    """Replaces what stands between the markers of a page.

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"report: a page must contain {BEGIN} and {END}; they are missing")
    return f"{before}{begin}\n{content}\n{end}{after}"


def main() -> None:
    by_suite, on_gpu = results(), results(GPU_RESULTS)
    blocks = {
        RESULTS_PAGE: tables.speedups_table(by_suite),
        GPU_PAGE: tables.gpu_table(on_gpu["step"]),
        GPU_NOTES: gpu_block(on_gpu),
    }
    for path, content in blocks.items():
        path.write_text(fill(path.read_text(), content))
    PAGE.write_text(page(by_suite))
    for theme in plots.THEMES:
        plots.plot_first_picture(by_suite["step"], PLOTS / f"first-{theme}.svg", theme)
    pages = ", ".join(str(path.relative_to(ROOT)) for path in (*blocks, PAGE, PLOTS))
    print(f"{pages}: {', '.join(by_suite) or 'no results yet'}")


if __name__ == "__main__":
    main()
