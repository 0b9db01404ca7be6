"""README's overview, docs/benchmarks.md and the plots are those of the results that are committed."""

import json

import pytest

from benchmarks import report, tables


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
        "rounds": 3,
        "cases": [
            {"name": "a case", "group": "g", "sides": {"TRL": side, "other": lost, "fastdpo": side}, "facts": {}}
        ],
        "summary": {"cases": {"a case": of_case}, "groups": {"g": {"TRL": estimate(4.0) | {"cases": 1}}}},
    }


def test_pages_are_up_to_date():
    found, stale = report.results(), "run `python -m benchmarks.report`"
    readme, of_gpu = report.README.read_text(), report.GPU_PAGE.read_text()
    assert report.filled(readme, tables.overview(found)) == readme, stale
    assert report.filled(of_gpu, report.on_gpu(report.results(report.GPU_RESULTS))) == of_gpu, stale
    assert report.page(found) == report.PAGE.read_text(), stale


def test_every_result_has_its_plot():
    for name in report.results():
        assert (report.PLOTS / f"{name}.svg").exists(), "run `python -m benchmarks.report`"


def test_the_page_shows_what_was_measured_and_what_was_not(result):
    text = report.page({"head": result})
    assert "## A title" in text
    assert "2.00 s, 4.00x, 8 MiB" in text
    assert "not equal: log-probs off by 1.0e-01" in text
    assert "4.00x (3.60 to 4.40)" in text
    assert "`python -m benchmarks.run --suite head --rounds 3` on cpu a processor, threads 2;" in text
    assert "python 3.11, torch 2.13; 2026-01-02, commit 0123456." in text
    assert "](plots/head.svg)" in text


def samples(*seconds: float) -> dict:
    return {"samples": [{"batch": 0, "seconds": x} for x in seconds]}


def test_the_overview_is_of_geometric_means(result):
    sides = {"TRL as shipped": samples(8.0, 8.0), "fastdpo": samples(2.0, 2.0), "floor": samples(1.6, 1.6)}
    sides["fastdpo, reference remembered"] = samples(1.0, 1.0)
    twice = {**sides, "TRL as shipped": samples(32.0, 32.0)}
    cases = [{"name": str(i), "group": "full", "sides": case} for i, case in enumerate((sides, twice))]
    text = tables.overview({"head": result, "step": result | {"suite": "step", "cases": cases}})
    step, remembered, head = (line for line in text.splitlines() if line.startswith(("| a training", "| head")))
    assert [cell.strip() for cell in step.split("|")[1:-1]] == [
        *("a training step, full", "2", "8.00x (8.00 to 8.00)", "1.25x (1.25 to 1.25)"),
    ]
    assert "16.00x (16.00 to 16.00)" in remembered
    assert "4.00x (3.60 to 4.40)" in head


def test_the_overview_is_put_between_its_markers(result):
    text = "before\n<!-- benchmarks:begin -->\nold\n<!-- benchmarks:end -->\nafter\n"
    overview = tables.overview({"head": result})
    found = report.filled(text, overview)
    assert found.startswith("before\n<!-- benchmarks:begin -->\n|")
    assert found.endswith("|\n<!-- benchmarks:end -->\nafter\n")
    assert "old" not in found
    assert report.filled(found, overview) == found
    with pytest.raises(ValueError, match="must hold <!-- benchmarks:begin -->"):
        report.filled("", overview)


def test_the_report_is_written(result, monkeypatch, tmp_path):
    readme, directory = tmp_path / "README.md", tmp_path / "results"
    directory.mkdir()
    (directory / "head.json").write_text(json.dumps(result))
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "gpu.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    (directory / "gpu").mkdir()
    machine = {"machine": result["machine"] | {"accelerator": "a GPU"}}
    (directory / "gpu" / "step.json").write_text(json.dumps(result | machine | {"suite": "step", "title": "Steps"}))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "README", readme)
    monkeypatch.setattr(report, "PAGE", tmp_path / "docs" / "benchmarks.md")
    monkeypatch.setattr(report, "GPU_PAGE", tmp_path / "docs" / "gpu.md")
    monkeypatch.setattr(report, "GPU_RESULTS", directory / "gpu")
    monkeypatch.setattr(report, "PLOTS", tmp_path / "docs" / "plots")
    monkeypatch.setattr(report, "results", lambda of=directory, read=report.results: read(of))
    report.main()
    assert "| head, g" in readme.read_text()
    assert "| a case" in (tmp_path / "docs" / "benchmarks.md").read_text()
    of_gpu = (tmp_path / "docs" / "gpu.md").read_text()
    assert "### Steps" in of_gpu
    assert "2.00 s, 4.00x, 8 MiB" in of_gpu
    assert (tmp_path / "docs" / "plots" / "head.svg").exists()
    (directory / "head.json").write_text(json.dumps(result | {"quick": True}))
    with pytest.raises(ValueError, match="full run"):
        report.main()
