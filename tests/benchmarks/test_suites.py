"""Every suite runs, on tiny sizes: all sides equal, all measured. A side that is wrong gets no speed."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import plots, run, tables, turns
from benchmarks.cases import SUBJECT, Case, Side
from benchmarks.sides.heads import HeadWorkload
from benchmarks.suites import SUITES, step

HERE = Path(__file__).parent


def run_suite(suite: str, tmp_path: Path, *options: str) -> tuple[int, dict]:
    out = tmp_path / "result.json"
    code = run.main(["--suite", suite, "--quick", "--threads", "1", "--json", str(out), *options])
    return code, json.loads(out.read_text())


@pytest.mark.parametrize(
    ("suite", "cases"),
    [
        ("step", "full|LoRA"),
        ("bf16", ""),
        ("evaluation", ""),
        ("precompute", ""),
        ("online", ""),
        ("head", "frozen|trainable"),
        ("attention", ""),
        ("memory", "head/512|knob"),
        ("scaling", "pairs|scored"),
    ],
)
def test_a_suite(suite, cases, tmp_path, capsys):
    code, result = run_suite(suite, tmp_path, "--cases", cases, "--rounds", "1")
    sides = [side for case in result["cases"] for side in case["sides"].values()]
    assert {side["status"] for side in sides} <= {"measured", "not runnable here"}
    assert code == 0
    for side in sides:
        if side["status"] == "measured":
            assert not side["compared"] or side["checks"]
            assert len(side["samples"]) >= 1
            assert all(sample["seconds"] > 0 for sample in side["samples"])
    assert {"torch", "transformers", "trl", "fastdpo", "peft", "python"} <= result["versions"].keys()
    assert {"cpu", "threads"} <= result["machine"].keys()
    assert result["command"].startswith(f"python -m benchmarks.run --suite {suite} --quick")
    assert {"date", "commit", "rounds"} <= result.keys()
    assert tables.table(result) in capsys.readouterr().out
    for claim in result["summary"].get("claims", []):
        assert claim["holds"] or claim["unit"] != "bytes", claim["claim"]

    first, second = tmp_path / "1.svg", tmp_path / "2.svg"
    plots.plot(result, first)
    plots.plot(result, second)
    assert first.read_text().startswith("<?xml")
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < 100_000
    if suite == "step":
        facts = {name: side["facts"] for name, side in result["cases"][0]["sides"].items()}
        assert facts[SUBJECT]["tokens"] == facts[step.FLOOR]["tokens"] < facts[step.STOCK]["tokens"]


@pytest.mark.parametrize("case", range(2))
def test_steps_of_models_in_bfloat16(case, monkeypatch, tmp_path):
    """The cases of a GPU, small enough for a CPU; the sides one after another, as there."""
    monkeypatch.setitem(
        SUITES, "step", dataclasses.replace(SUITES["step"], cases=lambda q: [step.cases_on_gpu(q)[case]])
    )
    init = turns.Turns.__init__

    def one_after_another(self, *args):
        init(self, *args)
        self.on_gpu = True

    monkeypatch.setattr(turns.Turns, "__init__", one_after_another)
    code, result = run_suite("step", tmp_path, "--rounds", "1")
    assert code == 0
    sides = result["cases"][0]["sides"]
    assert {name: side["status"] for name, side in sides.items() if name != step.STOCK_FLASH} == dict.fromkeys(
        (step.STOCK, step.APART, SUBJECT, step.REMEMBERED), "measured"
    )
    tokens = {name: side["facts"]["tokens"] for name, side in sides.items() if side["status"] == "measured"}
    assert tokens[SUBJECT] < tokens[step.APART] < tokens[step.STOCK]


@pytest.fixture
def sabotaged_suite(monkeypatch):
    """The suite of heads with one case: plain PyTorch, fastdpo, and sides that are wrong each in its way."""
    monkeypatch.syspath_prepend(HERE)
    work = HeadWorkload(n=16, v=50, d=8, trainable=True)
    sound = [Side(name, "benchmarks.sides.heads:HeadStep", work, {"peer": name}) for name in ("plain PyTorch", SUBJECT)]
    wrong = [Side(name, f"sabotaged:{name}", work) for name in ("Wrong", "Silent", "NaN", "Dies", "Raises")]
    case = Case("a case", "group", (*wrong, *sound))
    suite = dataclasses.replace(SUITES["head"], cases=lambda quick: [case])
    monkeypatch.setitem(SUITES, "head", suite)


def test_a_side_that_is_wrong_gets_no_speed(sabotaged_suite, tmp_path, capsys):
    code, result = run_suite("head", tmp_path)
    assert code == 1
    (case,) = result["cases"]
    status = {name: side["status"] for name, side in case["sides"].items()}
    assert status == {
        **dict.fromkeys(("Wrong", "Silent", "NaN"), "not equal"),
        **dict.fromkeys(("Dies", "Raises"), "failed"),
        **dict.fromkeys(("plain PyTorch", SUBJECT), "measured"),
    }
    summary = result["summary"]["cases"]["a case"]
    for name in ("Wrong", "Silent", "NaN", "Dies", "Raises"):
        assert "samples" not in case["sides"][name]
        assert all(name not in numbers for numbers in summary.values())
    assert "gradient of hidden off by 1.0e-03" in case["sides"]["Wrong"]["reason"]
    assert "missing" in case["sides"]["Silent"]["reason"]
    assert "exit code 9. no more memory" in case["sides"]["Dies"]["reason"]
    assert "too large" in case["sides"]["Raises"]["reason"]
    assert summary["times_fastdpo"].keys() == {"plain PyTorch"}
    plots.plot(result, tmp_path / "plot.svg")
    assert "not equal: gradient of hidden off by 1.0e-03" in capsys.readouterr().out


def test_no_speed_is_relative_to_a_sabotaged_fastdpo(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(HERE)
    work = HeadWorkload(n=16, v=50, d=8, trainable=False)
    sides = (
        Side("plain PyTorch", "benchmarks.sides.heads:HeadStep", work, {"peer": "plain PyTorch"}),
        Side(SUBJECT, "sabotaged:Wrong", work),
    )
    suite = dataclasses.replace(SUITES["head"], cases=lambda quick: [Case("a case", "group", sides)])
    monkeypatch.setitem(SUITES, "head", suite)
    code, result = run_suite("head", tmp_path)
    assert code == 1
    assert result["summary"]["cases"]["a case"]["times_fastdpo"] == {}
    plots.plot(result, tmp_path / "plot.svg")


def test_no_case_that_matches_is_an_error():
    with pytest.raises(SystemExit, match="--cases must match a case of head"):
        run.main(["--suite", "head", "--quick", "--cases", "nothing"])


def test_a_run_goes_on_where_another_stopped(monkeypatch, tmp_path):
    def cases(quick: bool):
        work = HeadWorkload(n=16, v=50, d=8, trainable=True)
        side = Side(SUBJECT, "benchmarks.sides.heads:HeadStep", work, {"peer": SUBJECT})
        return [Case(name, "group", (side,)) for name in ("a", "b")]

    monkeypatch.setitem(SUITES, "head", dataclasses.replace(SUITES["head"], cases=cases))
    _, first = run_suite("head", tmp_path, "--cases", "a", "--rounds", "1")
    with pytest.raises(SystemExit, match="--resume: rounds must be that of the file, 1; it is 2"):
        run_suite("head", tmp_path, "--rounds", "2", "--resume")
    _, whole = run_suite("head", tmp_path, "--rounds", "1", "--resume")
    assert whole["cases"][0] == first["cases"][0]
    assert [case["name"] for case in whole["cases"]] == ["a", "b"]
    assert whole["summary"]["cases"].keys() == {"a", "b"}
    assert whole["command"].count("python -m benchmarks.run") == 2
