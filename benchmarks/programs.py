"""Writes docs/notes/programs.md from trainings of real programs, stock and by `fastdpo run`.

    make measure-programs                         # writes a row for each training to out/programs
    python -m benchmarks.programs out/programs    # adds the rows to benchmarks/results/programs.json

Without a directory, it only writes the page again.
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
PAGE = ROOT / "docs" / "notes" / "programs.md"
COLUMNS = (
    "program",
    "version",
    "TRL",
    "command",
    "fused calls",
    "largest difference",
    "step time ratio",
    "rounds",
    tables.MEASURED_ON,
)
TEXT = """# Real programs

Written by `python -m benchmarks.programs` from
[benchmarks/results/programs.json](../../benchmarks/results/programs.json).
`make test-programs` builds an environment for each program and runs its own command twice on the same
model and data, as it is and by [`fastdpo run`](../run.md). The tests compare every logged number and
every saved weight. `make measure-programs` does so with longer trainings.

{table}

- *fused calls*: the line that `fastdpo run` prints at the end
- *largest difference*: of a logged number, relative to the larger of its size and 1, or of a saved
  weight, relative to its norm
- *step time ratio*: mean time of the six steps of a training, stock divided by fused; where a row has
  several rounds, in which the two took turns, their medians. The probe of the model is part of the
  first fused step

The model is a Llama with 6 layers, hidden size 256 and a vocabulary of 32,000, in float32. Prompts
have 150 to 300 tokens, completions 60 to 180.

{origins}
"""


def ratio(row: dict[str, Any]) -> str:
    stock, fused = (row["seconds"][side] for side in ("stock", "fused"))
    return f"{stock / fused:.1f}x ({stock:.2f} s / {fused:.2f} s)" if stock and fused else "not printed"


def page(results: dict[str, Any]) -> str:
    rows, origins = [], tables.Origins()
    for row in results["rows"]:
        calls = ", ".join(f"{kind} {n}" for kind, n in row["calls"].items())
        command = f"`{row['command']}`"
        difference = f"{row['difference']:.1e}"
        cells = (row["program"], row["version"], row["trl"], command, calls, difference, ratio(row), row["rounds"])
        rows.append((*cells, origins.cell(row | {"cases": []})))
    table = tabulate(rows, COLUMNS, tablefmt="github", disable_numparse=True)
    return TEXT.format(table=table, origins=tables.wrap(origins.note()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="of the rows of new trainings")
    directory = parser.parse_args().directory
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    if directory is not None:
        origin = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine.machine() | {"bfloat16": machine.bfloat16()},
        }
        key = ("program", "version", "trl", "command")
        rows = {tuple(row[name] for name in key): row for row in results["rows"]}
        for path in sorted(directory.glob("*.json")):
            row = json.loads(path.read_text()) | origin
            rows[tuple(row[name] for name in key)] = row
        results = {"rows": [rows[name] for name in sorted(rows)]}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
