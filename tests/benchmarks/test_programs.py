"""The table of real programs: rows of new trainings replace old ones."""

import json
import sys

from benchmarks import programs, tables

ROW = {
    "program": "TRL",
    "version": "1.16.0",
    "trl": "1.16.0",
    "command": "trl dpo",
    "calls": {"policy fused": 6, "reference fused": 6},
    "difference": 1.25e-7,
    "seconds": {"stock": 3.0, "fused": 0.5},
    "rounds": 3,
}


def test_new_rows_replace_those_of_the_same_command(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "RESULTS", tmp_path / "programs.json")
    monkeypatch.setattr(sys, "argv", ["programs", str(tmp_path / "rows")])
    (tmp_path / "rows").mkdir()
    lora = ROW | {"command": "trl dpo --use_peft true", "seconds": {"stock": None, "fused": None}}
    for row in (ROW | {"version": "1.15.0"}, ROW | {"difference": 2.5e-7}, lora):
        (tmp_path / "rows" / "row.json").write_text(json.dumps(row))
        programs.main()
    rows = json.loads(programs.RESULTS.read_text())["rows"]
    assert [row | given for row, given in zip(rows, (ROW | {"difference": 2.5e-7}, lora), strict=True)] == rows
    assert all({"commit", "machine", "date"} <= row.keys() for row in rows)
    table = programs.table({"rows": rows})
    first, second = (line for line in table.splitlines() if line.startswith("| `trl"))
    assert "`trl dpo`" in first
    assert "2.5e-07" in first
    assert "6.0x (3.00 s / 0.50 s)" in first
    assert "not printed" in second
    place = f"{tables.machine_of(rows[0])}, commit {tables.short_commit(rows[0]['commit'])}"
    assert " ".join(table.split()).endswith(f"TRL 1.16.0. Measured on {place}.")
