"""Brings README.md's tables and docs/plots up to the results that are committed.

    python -m benchmarks.report

The table of a suite stands between `<!-- SUITE:begin -->` and `<!-- SUITE:end -->`; suites without a result are left
alone.
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
PLOTS = ROOT / "docs" / "plots"


def results(directory: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The committed runs of suites, by suite."""
    paths = {name: directory / f"{name}.json" for name in SUITES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def section(result: dict[str, Any]) -> str:
    plot = (PLOTS / f"{result['suite']}.svg").relative_to(ROOT)
    return f"{tables.table(result)}\n\n{tables.where(result)}\n\n![{result['title']}]({plot})"


def filled(text: str, found: dict[str, dict[str, Any]]) -> str:
    """A text with the tables of these results between their markers.

    Raises:
        ValueError: a result has no markers, or it comes from a quick run.
    """
    for name, result in found.items():
        if result["quick"]:
            raise ValueError(f"report: {name}.json must come from a full run; it was made with --quick")
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise ValueError(f"report: README.md must hold {begin} and {end}; they are missing")
        text = f"{before}{begin}\n{section(result)}\n{end}{after}"
    return text


def main() -> None:
    found = results()
    README.write_text(filled(README.read_text(), found))
    for name, result in found.items():
        plots.plot(result, PLOTS / f"{name}.svg")
    print(f"README.md and {PLOTS.relative_to(ROOT)}: {', '.join(found) or 'no results yet'}")


if __name__ == "__main__":
    main()
