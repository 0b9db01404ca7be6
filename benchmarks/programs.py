"""Collects trainings of real programs, stock and by `fastdpo run`, for a table of docs/results.md.

make measure-programs                         # writes a row for each training to out/programs
python -m benchmarks.programs out/programs    # adds the rows to benchmarks/results/programs.json
python -m benchmarks.report                   # writes the table
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks import machine, tables
from benchmarks.machine import commit

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "programs.json"
COLUMNS = "command", "largest difference", "stock / fastdpo"


def ratio(row: dict[str, Any]) -> str:
    stock, fused = (row["seconds"][side] for side in ("stock", "fused"))
    return f"{stock / fused:.1f}x ({stock:.2f} s / {fused:.2f} s)" if stock and fused else "not printed"


def table(results: dict[str, Any]) -> str:
    """One row for each training, and a note about the versions of the programs and where they ran."""
    rows, shown = [], {}
    versions = dict.fromkeys(f"{row['program']} {row['version']}" for row in results["rows"])
    for row in results["rows"]:
        command = f"`{row['command']}`"
        rows.append((command, f"{row['difference']:.1e}", ratio(row)))
        shown[command] = row | {"cases": []}
    table = tabulate(rows, COLUMNS, tablefmt="github", disable_numparse=True)
    note = f"Programs: {', '.join(versions)}. {tables.measured_on(shown)}"
    return f"{table}\n\n{tables.wrap(note)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the rows of new trainings")
    directory = parser.parse_args().directory
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    origin = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine.machine() | {"bfloat16": machine.bfloat16()},
    }
    key = ("program", "command")
    rows = {tuple(row[name] for name in key): row for row in results["rows"]}
    for path in sorted(directory.glob("*.json")):
        row = json.loads(path.read_text()) | origin
        rows[tuple(row[name] for name in key)] = row
    RESULTS.write_text(json.dumps({"rows": [rows[name] for name in sorted(rows)]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
