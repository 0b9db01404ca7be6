"""The generated parts of docs/results.md and docs/gpu.md, the page of all suites, and the plots."""

import copy
import dataclasses
import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from benchmarks import plots, report, tables
from benchmarks.cases import SUBJECT
from benchmarks.sides.workload import Workload
from benchmarks.suites import SUITES, step
from benchmarks.summary import summarize

WORKLOAD = dataclasses.asdict(Workload((((3, 2, 2), (4, 1, 5)),)))


def estimate(value: float) -> dict:
    return {"value": value, "low": 0.9 * value, "high": 1.1 * value}


def mean(value: float) -> dict:
    return estimate(value) | {"cases": 1, "missing": []}


@pytest.fixture
def result() -> dict:
    """The result of a run of the suite `head` with one case."""
    side = {"status": "measured", "reason": None, "compared": True, "options": {}, "facts": {}, "samples": []}
    summary = {
        "seconds": {"TRL": estimate(2.0), "fastdpo": estimate(0.5)},
        "peak_bytes": {"TRL": 8 << 20, "fastdpo": 2 << 20},
        "times_fastdpo": {"TRL": estimate(4.0)},
        "work": {"tokens": 100, "model_flops": 1e6, "weights_bytes": 1 << 20},
        "tokens_per_second": {"TRL": 50.0, "fastdpo": 200.0},
        "utilization": {},
    }
    incorrect = side | {"status": "incorrect", "reason": "log-probs: error 1.0e-01 (allowed 1.0e-06)"}
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
            {
                "name": "a case",
                "group": "trainable",
                "sides": {"TRL": side, "other": incorrect, "fastdpo": side},
                "facts": {},
            }
        ],
        "summary": {"cases": {"a case": summary}, "groups": {"trainable": {"TRL": mean(4.0)}}},
    }


@pytest.fixture(scope="module")
def committed() -> dict[str, dict]:
    """The results by suite."""
    return report.results()


def test_pages_are_up_to_date(committed):
    speedups, gpu = report.RESULTS_PAGE.read_text(), report.GPU_PAGE.read_text()
    stale = "run `python -m benchmarks.report`"
    on_gpu, trainings = report.results(report.GPU_RESULTS), json.loads(report.TRAININGS.read_text())
    assert report.results_page(speedups, committed) == speedups, stale
    assert report.gpu_page(gpu, on_gpu, trainings) == gpu, stale


def test_the_history_has_the_commits_of_all_results():
    if not (report.ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone")
    files = {path: path.read_text() for path in sorted(report.RESULTS.rglob("*.json"))}
    log = subprocess.run(["git", "log", "--format=%H"], cwd=report.ROOT, check=True, capture_output=True, text=True)
    kept = {*log.stdout.split()}
    named = {path.name: {*re.findall(r'"commit": "([^" ]+)', text)} for path, text in files.items()}
    assert {name: commits - kept for name, commits in named.items() if commits - kept} == {}


def test_a_changed_result_is_found(committed):
    """Pages follow the samples of a run: five times the time of fastdpo changes their tables."""
    before = report.page(committed, {})
    for name in ("step", "head", "attention", "kept"):
        result = copy.deepcopy(committed[name])
        for case in result["cases"]:
            for sample in case["sides"]["fastdpo"]["samples"]:
                sample["seconds"] *= 5
        result["summary"] |= summarize(result)
        changed = committed | {name: result}
        assert report.page(changed, {}) != before, name
        if name == "step":
            assert tables.speedups_table(changed) != tables.speedups_table(committed)


OF_SUITES = [path for path in sorted(report.RESULTS.rglob("*.json")) if path.stem in SUITES]


@pytest.mark.parametrize("path", OF_SUITES, ids=[str(path.relative_to(report.RESULTS)) for path in OF_SUITES])
def test_a_committed_summary_is_that_of_its_samples(path):
    result = json.loads(path.read_text())
    computed = json.loads(json.dumps(summarize(result)))
    committed, computed = leaves(result["summary"]), leaves(computed)
    assert committed.keys() == computed.keys()
    for path, value in committed.items():  # the last bits of floats differ between processors
        assert computed[path] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), path


def leaves(x: Any, path: str = "") -> dict[str, Any]:
    """The values of nested dicts and lists by path."""
    if isinstance(x, dict | list):
        items = x.items() if isinstance(x, dict) else enumerate(x)
        return {name: value for key, part in items for name, value in leaves(part, f"{path}/{key}").items()}
    return {path: x}


def test_every_side_of_the_suites_is_described():
    for name, suite in SUITES.items():
        sides = {side.name for case in suite.cases(False) for side in case.sides}
        assert sides - suite.descriptions.keys() == set(), name


@pytest.mark.parametrize("theme", plots.THEMES)
def test_the_first_picture_shows_the_committed_ratios(theme, committed, tmp_path):
    """Of time and of memory, between the sides that score the same positions."""
    picture, step = (report.PICTURES / f"first-{theme}.svg").read_text(), committed["step"]
    summaries = [summary for name, summary in step["summary"]["cases"].items() if name.startswith("full/")]
    sides = ("TRL, labelled positions only", "fastdpo")
    seconds = [[summary["seconds"][side]["value"] for side in sides] for summary in summaries]
    peaks = [[summary["peak_bytes"][side] for side in sides] for summary in summaries]
    ratios = [f"{theirs / ours:.1f}x" for theirs, ours in (*seconds, *peaks)]
    assert len(ratios) == 12
    assert re.findall(r">([\d.]+x)<", picture) == ratios
    plots.plot_first_picture(step, tmp_path / "first.svg", theme)
    drawn = (tmp_path / "first.svg").read_text()
    assert re.findall(r">[^<>]+</text>|#[0-9a-f]{6}", drawn) == re.findall(r">[^<>]+</text>|#[0-9a-f]{6}", picture)


def test_the_page_shows_measurements_and_reasons_for_missing_ones(result):
    text = report.page({"head": result}, {"head": result | {"title": "On another machine"}})
    assert "## A title" in text
    assert "2.00 s, 4.00x, 8 MiB" in text
    assert "incorrect: log-probs: error 1.0e-01" in text
    assert "4.00x (3.60 to 4.40)" in text
    assert "`python -m benchmarks.run --suite head --rounds 3` on cpu a processor, threads 2;" in text
    assert "python 3.11, torch 2.13; 2026-01-02, commit 0123456." in text.replace("\n", " ")
    assert "### On another machine" in text


def samples(*seconds: float) -> dict:
    return {"options": {}, "samples": [{"batch": 0, "seconds": x, "peak_bytes": 0} for x in seconds]}


@pytest.fixture
def step_result(result) -> dict:
    """Six LoRA cases of the suite `step`. In one of them, TRL as shipped failed."""
    names = ("HH", "TL;DR", "UltraFeedback", "HelpSteer", "MetaMath", "Capybara")
    cases = []
    for name in names:
        sides = {
            "TRL as shipped": samples(8.0, 8.0) | {"status": "measured"},
            "TRL, labelled positions only": samples(4.0, 4.0) | {"status": "measured"},
            "fastdpo": samples(2.0, 2.0) | {"status": "measured"},
        }
        cases.append({"name": f"LoRA/{name}", "group": "LoRA", "facts": {}, "workload": WORKLOAD, "sides": sides})
    # The slowest case of the other side, so that a mean without it would be a different number.
    cases[-1]["sides"]["TRL, labelled positions only"] = samples(16.0, 16.0) | {"status": "measured"}
    cases[-1]["sides"]["TRL as shipped"] = {"status": "failed", "reason": "out of memory"}
    of_suite = result | {"suite": "step", "title": "Steps", "cases": cases}
    return of_suite | {"summary": summarize(of_suite)}


def cells(text: str, row: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {row}"))  # in the first table
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.mark.parametrize(
    ("table", "row", "mean"),
    [
        (lambda r: tables.table(r), "LoRA, geometric mean", "4.00x (4.00 to 4.00)"),
        (lambda r: tables.sides_table(r), "LoRA, geometric mean", "4.00x (4.00 to 4.00)"),
        (lambda r: tables.overview({"step": r}), "Training step, LoRA", "4.00x (4.00 to 4.00)"),
        (lambda r: tables.speedups_table({"step": r}), "Training step, LoRA", "4.0x"),
    ],
    ids=["step", "sides", "overview", "speedups"],
)
def test_a_mean_names_its_missing_cases(table, row, mean, step_result):
    means = cells(table(step_result), row)
    (shipped,) = (cell for cell in means if cell.startswith("4.0"))
    assert shipped == f"{mean}, 5 of 6 (Capybara missing)"
    (labelled,) = (cell for cell in means if cell.startswith("2.5"))  # (2^5 * 8)^(1/6): all six cases
    assert "of 6" not in labelled


def test_a_side_that_no_case_measured_has_no_column_but_a_reason(step_result):
    for case in step_result["cases"]:
        case["sides"]["QuACK"] = {"status": "unavailable", "reason": "not installed"}
    descriptions = {"QuACK": "another head.", "fastdpo": "ours."}
    assert "QuACK" not in tables.sides_table(step_result)
    listed = tables.sides_list(step_result, descriptions).splitlines()
    assert listed == ["- **fastdpo**: ours.", "- Not measured: QuACK (not installed)."]
    step_result["cases"][0]["sides"]["QuACK"] = samples(8.0, 8.0) | {"status": "measured"}
    step_result["summary"] = summarize(step_result)
    assert "QuACK" in tables.sides_table(step_result)


def test_the_page_of_results_begins_with_at_most_six_rows():
    assert len(tables.SPEEDUP_ROWS) <= 6
    lines = tables.speedups_table(report.results()).partition("\n\n")[0].splitlines()
    assert 1 < sum(line.startswith("|") for line in lines) <= 2 + 6
    assert all(len(line.split("|")) - 2 <= 5 for line in lines if line.startswith("|"))


def test_the_table_of_a_gpu_compares_what_was_decided_with_the_best_choice(result):
    seconds = {step.STOCK: 8.0, SUBJECT: 4.0, step.GRAPHS_OF_COMPILED: 2.0, step.AUTO: 2.2}
    sides = {name: samples(x, x) | {"status": "measured"} for name, x in seconds.items()}
    cases = [{"name": "a case", "group": "0.5B", "facts": {}, "workload": WORKLOAD, "sides": sides}]
    on_gpu = result | {"suite": "step", "cases": cases, "machine": {"accelerator": "a GPU"}}
    summary = summarize(on_gpu)
    summary["cases"]["a case"]["work"]["weights_bytes"] = 3 << 29
    text = tables.gpu_table(on_gpu | {"summary": summary})
    assert text.endswith("The weights take 1.50 GiB (a case).")
    row = cells(text, "a case")
    assert row[1:6] == ["8.00 s", "2.20 s, 3.64x", "1.10", "4.00 s, 2.00x", "2.00 s, 4.00x"]


def test_the_report_is_written(result, step_result, monkeypatch, tmp_path):
    directory, speedups, on_gpu = tmp_path / "results", tmp_path / "results.md", tmp_path / "gpu.md"
    (directory / "gpu").mkdir(parents=True)
    (directory / "head.json").write_text(json.dumps(result))
    (directory / "step.json").write_text(json.dumps(step_result))
    machine = {"machine": result["machine"] | {"accelerator": "a GPU"}}
    (directory / "gpu" / "step.json").write_text(json.dumps(result | machine | {"suite": "step", "title": "Steps"}))
    markers = "<!-- benchmarks:begin -->\n<!-- benchmarks:end -->\n"
    speedups.write_text(markers)
    on_gpu.write_text(markers + markers.replace("benchmarks", "trainings"))
    monkeypatch.setattr(report, "RESULTS_PAGE", speedups)
    monkeypatch.setattr(report, "GPU_PAGE", on_gpu)
    monkeypatch.setattr(report, "GPU_RESULTS", directory / "gpu")
    monkeypatch.setattr(report, "OTHERS", {})
    monkeypatch.setattr(report, "PICTURES", tmp_path)
    monkeypatch.setattr(report, "results", lambda path=directory, read=report.results: read(path))
    report.main([])
    row = "Training step, LoRA (6 datasets)"
    assert cells(speedups.read_text(), row) == [row, "2.5x", "4.0x, 5 of 6 (Capybara missing)"]
    assert "| a case" in on_gpu.read_text()
    assert (tmp_path / "first-dark.svg").exists()

    report.main(["--site", str(tmp_path / "site" / "benchmarks.md")])
    page = (tmp_path / "site" / "benchmarks.md").read_text()
    assert "## A title" in page
    assert "### Steps" in page
    (directory / "head.json").write_text(json.dumps(result | {"quick": True}))
    with pytest.raises(ValueError, match="full run"):
        report.main([])
