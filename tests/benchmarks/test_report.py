"""README's tables and the plots are those of the results that are committed."""

import json

import pytest

from benchmarks import report
from benchmarks.suites import SUITES


def estimate(value: float) -> dict:
    return {"value": value, "low": 0.9 * value, "high": 1.1 * value}


@pytest.fixture
def result() -> dict:
    """A run of the suite of heads with one case."""
    side = {"status": "measured", "reason": None, "compared": True, "options": {}, "facts": {}, "samples": []}
    of_case = {
        "seconds": {"TRL": estimate(2.0), "fastdpo": estimate(0.5)},
        "peak_bytes": {"TRL": 8 << 20, "fastdpo": 2 << 20},
        "times_fastdpo": {"TRL": estimate(4.0)},
    }
    lost = side | {"status": "not equal", "reason": "log-probs off by 1.0e-01 (allowed 1.0e-06)"}
    return {
        "suite": "head",
        "title": "A title",
        "command": "python -m benchmarks.run --suite head",
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "0123456789",
        "machine": {"cpu": "a processor", "threads": 2},
        "versions": {"python": "3.11", "torch": "2.13", "liger-kernel": "not installed"},
        "quick": False,
        "cases": [
            {"name": "a case", "group": "g", "sides": {"TRL": side, "other": lost, "fastdpo": side}, "facts": {}}
        ],
        "summary": {"cases": {"a case": of_case}, "groups": {"g": {"TRL": estimate(4.0) | {"cases": 1}}}},
    }


def test_readme_is_up_to_date():
    text = report.README.read_text()
    assert report.filled(text, report.results()) == text, "run `python -m benchmarks.report`"


def test_every_result_has_its_plot():
    for name in report.results():
        assert (report.PLOTS / f"{name}.svg").exists(), "run `python -m benchmarks.report`"


def test_readme_has_markers_for_every_suite():
    text = report.README.read_text()
    for name in SUITES:
        assert text.index(f"<!-- {name}:begin -->") < text.index(f"<!-- {name}:end -->")


def test_a_table_is_put_between_its_markers(result):
    text = "before\n<!-- head:begin -->\nold\n<!-- head:end -->\nafter <!-- step:begin -->\n<!-- step:end -->\n"
    found = report.filled(text, {"head": result})
    assert found.startswith("before\n<!-- head:begin -->\n")
    assert found.endswith("\n<!-- head:end -->\nafter <!-- step:begin -->\n<!-- step:end -->\n")
    assert "old" not in found
    assert "2.00 s, 4.00x, 8 MiB" in found
    assert "not equal: log-probs off by 1.0e-01" in found
    assert "4.00x (3.60 to 4.40)" in found
    assert "cpu a processor, threads 2; python 3.11, torch 2.13; 2026-01-02, commit 0123456." in found
    assert "](docs/plots/head.svg)" in found
    assert report.filled(found, {"head": result}) == found


def test_a_result_without_markers_and_a_quick_one_are_refused(result):
    with pytest.raises(ValueError, match="must hold <!-- head:begin -->"):
        report.filled("", {"head": result})
    with pytest.raises(ValueError, match="full run"):
        report.filled("<!-- head:begin --><!-- head:end -->", {"head": result | {"quick": True}})


def test_the_report_writes_tables_and_plots(result, monkeypatch, tmp_path):
    readme, directory = tmp_path / "README.md", tmp_path / "results"
    directory.mkdir()
    (directory / "head.json").write_text(json.dumps(result))
    readme.write_text("<!-- head:begin -->\n<!-- head:end -->\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "README", readme)
    monkeypatch.setattr(report, "PLOTS", tmp_path / "docs" / "plots")
    monkeypatch.setattr(report, "results", lambda read=report.results: read(directory))
    report.main()
    assert "| a case" in readme.read_text()
    assert (tmp_path / "docs" / "plots" / "head.svg").exists()
