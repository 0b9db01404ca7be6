"""Every suite runs on tiny sizes and finds its sides correct. An incorrect side gets no time."""

import dataclasses
import itertools
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import case_runner, machine, run, tables, worker
from benchmarks.cases import SUBJECT, Case, Side, Suite
from benchmarks.equality import compare_to_truth, describe_failures
from benchmarks.sides.attention import AttentionWorkload, ExactAttention, PackedAttention, PaddedAttention
from benchmarks.sides.heads import HeadWorkload
from benchmarks.sides.trainer import TrainerStep
from benchmarks.sides.workload import Workload
from benchmarks.suites import SUITES, attention, step, trainers
from benchmarks.worker import build_side
from tests.support.programs.warm import run_program

HERE = Path(__file__).parent


WITHOUT_TRL = """
import sys
sys.modules |= dict.fromkeys(["trl", *(name for name in sys.modules if name.startswith("trl."))])
import benchmarks.run
"""


def test_the_command_starts_without_trl(tmp_path):
    """It is not there on some machines with a GPU, and cannot be imported before LLaMA-Factory."""
    (tmp_path / "start.py").write_text(WITHOUT_TRL)
    done = run_program(tmp_path / "start.py")
    assert done.returncode == 0, done.stderr


def run_suite(suite: str, tmp_path: Path, *options: str, code: int = 0) -> dict:
    """The result of a run, which ends with a code."""
    out = tmp_path / "result.json"
    assert run.main(["--suite", suite, "--quick", "--threads", "1", "--json", str(out), *options]) == code
    return json.loads(out.read_text())


@pytest.fixture
def run_cases(monkeypatch, tmp_path):
    """Runs cases in the place of those of a suite."""
    monkeypatch.syspath_prepend(HERE)

    def run_them(suite: str, cases: list[Case], *options: str, code: int = 0) -> dict:
        monkeypatch.setitem(SUITES, suite, dataclasses.replace(SUITES[suite], cases=lambda quick: cases))
        return run_suite(suite, tmp_path, *options, code=code)

    return run_them


def without_compiling(suite: Suite) -> Suite:
    """The suite without the side that torch.compile takes half a minute for."""

    def build_cases(quick: bool) -> list[Case]:
        return [
            dataclasses.replace(case, sides=tuple(side for side in case.sides if "compiled" not in side.name))
            for case in suite.cases(quick)
        ]

    return dataclasses.replace(suite, cases=build_cases)


@pytest.mark.parametrize(
    ("suite", "cases"),
    [
        ("step", "full"),
        pytest.param("step", "LoRA", marks=pytest.mark.thorough),
        pytest.param("kept", "full", marks=pytest.mark.thorough),
        ("online", ""),
        ("kto", ""),
        pytest.param("grpo", "GRPO|RLOO", marks=pytest.mark.thorough),
        ("reward", ""),
        ("accumulated", "KTO|GRPO/2"),
        pytest.param("accumulated", "DPO|Reward|GRPO/1", marks=pytest.mark.thorough),
        ("vision", "qwen3_vl/2 images"),
        pytest.param("vision", "(smolvlm|mistral3|gemma3)/2 images|gemma3/LoRA", marks=pytest.mark.thorough),
        ("head", "trainable, summed"),
        ("head", "trainable, statistics"),
        pytest.param("head", "trainable, entropy|frozen, summed|frozen, statistics", marks=pytest.mark.thorough),
        ("loss", ""),
        ("attention", "quick"),
        ("host", "full"),
        *(pytest.param("host", cases, marks=pytest.mark.thorough) for cases in ("LoRA", "compiled")),
        ("memory", "head/512"),
        pytest.param("memory", "step", marks=pytest.mark.thorough),
    ],
)
def test_a_suite(suite, cases, tmp_path, capsys, monkeypatch, pytestconfig):
    if pytestconfig.getoption("quick"):
        monkeypatch.setitem(SUITES, suite, without_compiling(SUITES[suite]))
    result = run_suite(suite, tmp_path, "--cases", cases, "--rounds", "1")
    sides = [side for case in result["cases"] for side in case["sides"].values()]
    assert {side["status"] for side in sides} <= {"measured", "unavailable"}
    for side in sides:
        if side["status"] == "measured":
            assert not side["compared"] or side["checks"]
            assert all(check["allowed"] < 1e-3 for check in side.get("checks", [])), (
                "the ground truth and its rounding differ"
            )
            assert len(side["samples"]) >= 1
            assert all(sample["seconds"] > 0 for sample in side["samples"])
    assert {"torch", "transformers", "trl", "fastdpo", "peft", "python"} <= result["versions"].keys()
    assert {"cpu", "threads"} <= result["machine"].keys()
    assert result["command"].startswith(f"python -m benchmarks.run --suite {suite} --quick")
    assert {"date", "commit", "rounds"} <= result.keys()
    assert tables.table(result) in capsys.readouterr().out
    if suite == "host":
        for case in result["cases"]:
            facts = {name: side["facts"] for name, side in case["sides"].items()}
            assert all(sum(x["profile"].values()) == pytest.approx(1) for x in facts.values())
            assert facts[SUBJECT]["tokens"] < facts[step.STOCK]["tokens"]
            layers = case["workload"]["size"]["layers"]
            assert "attention" not in facts[step.STOCK]["launches"]
            assert facts[SUBJECT]["launches"]["attention"] == 3 * layers
            assert facts[SUBJECT]["launches"]["_token_logps_fwd_kernel"] == 2
            assert cases == "compiled" or facts[step.STOCK]["launches"]["_forward_kernel"] == 2
    if suite in ("step", "reward"):
        facts = {name: side["facts"] for name, side in result["cases"][0]["sides"].items()}
        of_trl = [facts[name]["tokens"] for name in (step.STOCK, step.LABELLED) if name in facts]
        assert facts[SUBJECT]["tokens"] == facts[step.FLOOR]["tokens"] < of_trl[0] == of_trl[-1]


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3.5",
        *(pytest.param(x, marks=pytest.mark.thorough) for x in sorted({*trainers.ARCHITECTURES} - {"Qwen3.5"})),
    ],
)
def test_steps_of_hybrid_models(architecture, tmp_path):
    (case,) = run_suite("hybrid", tmp_path, "--rounds", "1", "--cases", architecture)["cases"]
    tokens = {name: side["facts"]["tokens"] for name, side in case["sides"].items()}
    assert tokens[SUBJECT] < tokens[step.LABELLED]


def test_attention_is_compared_in_some_of_its_heads():
    every = AttentionWorkload(((5, 3, 4), (2, 6, 1)), heads=4, kv_heads=2, d=8, dtype="float32")
    some = dataclasses.replace(every, compared=1)
    for build in (ExactAttention, PaddedAttention, partial(PackedAttention, shared=True)):
        whole, part = build(every).check(), build(some).check()
        for name, x in part.items():
            heads = 2 if name.rpartition("/")[2] in ("output", "gradient of queries") else 1
            assert x.shape[1] == heads
            np.testing.assert_array_equal(x, whole[name][:, :heads])


def test_attention_with_each_feature_of_a_gpus_cases_is_correct():
    """Windows, softcap, headers that all rows share, rows of one token, heads of 64, deterministic algorithms."""
    cases = {case.name: case for case in attention.build_cases(quick=True) if case.group == "features"}
    assert cases.keys() == attention.FEATURES.keys()
    for case in cases.values():
        truth = ExactAttention(case.sides[0].workload).check()
        for side in case.sides:
            if side.name == attention.PADDED and side.workload.softcap is not None:
                continue
            built = build_side(side.build, side.workload, side.options)
            checks = compare_to_truth(built.check(), truth)
            assert all(check["equal"] for check in checks), f"{case.name}, {side.name}: {describe_failures(checks)}"
            assert built.facts()["same_bits"]
    without = ExactAttention(dataclasses.replace(cases["window"].sides[0].workload, window=None)).check()
    truth = ExactAttention(cases["window"].sides[0].workload).check()
    assert not np.allclose(without["exact/output"], truth["exact/output"])


@pytest.mark.parametrize("case", [*(pytest.param(i, marks=pytest.mark.thorough) for i in range(4)), 4])
def test_steps_of_models_in_bfloat16(case, run_cases):
    """Runs the GPU cases on tiny sizes, without the side that is compiled for minutes. The sides run one by one, as on
    a GPU that does not hold them together.
    """
    work = step.build_gpu_cases(quick=True)[case]
    work = dataclasses.replace(work, sides=tuple(side for side in work.sides if side.name != step.STOCK_COMPILED))
    sides = run_cases("step", [work], "--rounds", "1", "--one-by-one")["cases"][0]["sides"]
    on_gpus = {step.STOCK_LIGER, step.LIGER, step.GRAPHS, step.GRAPHS_OF_COMPILED, step.AUTO}
    absent = {*step.STOCK_FLASH.values(), *on_gpus}
    measured = {step.STOCK, step.UNSHARED, SUBJECT, step.LAYERS_COMPILED}
    expected = dict.fromkeys(absent, "unavailable") | dict.fromkeys(measured, "measured")
    assert {name: side["status"] for name, side in sides.items()} == expected
    tokens = {name: sides[name]["facts"]["tokens"] for name in measured}
    assert tokens[SUBJECT] < tokens[step.UNSHARED] < tokens[step.STOCK]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_with_checkpointing_compute_layers_twice(checkpointing):
    work = Workload((((8, 4, 3),),), size=step.QUICK_SIZE, checkpointing=checkpointing)
    trained = TrainerStep(work, "stock")
    calls = []
    trained.model.model.layers[0].mlp.register_forward_pre_hook(lambda *call: calls.append(call))
    trained.step(0)
    assert len(calls) == 1 + checkpointing


WORK = HeadWorkload(n=16, v=50, d=8, trainable=True)


@pytest.fixture(params=[False, True])
def in_process(request, monkeypatch) -> bool:
    """Whether sides run in this process, or in others."""
    if request.param:
        monkeypatch.setattr(case_runner, "Worker", worker.InProcessWorker)
    return request.param


def head_side(name: str) -> Side:
    return Side(name, "benchmarks.sides.heads:HeadStep", WORK, {"peer": name})


def test_a_faulty_side_gets_no_time(run_cases, capsys):
    faulty = [Side(name, f"sabotaged:{name}", WORK) for name in ("Wrong", "Incomplete", "NaN", "Dies", "Raises")]
    case = Case("a case", "group", (*faulty, head_side("plain PyTorch"), head_side(SUBJECT)))
    result = run_cases("head", [case], code=1)
    (case,) = result["cases"]
    status = {name: side["status"] for name, side in case["sides"].items()}
    assert status == {
        **dict.fromkeys(("Wrong", "Incomplete", "NaN"), "incorrect"),
        **dict.fromkeys(("Dies", "Raises"), "failed"),
        **dict.fromkeys(("plain PyTorch", SUBJECT), "measured"),
    }
    summary = result["summary"]["cases"]["a case"]
    for name in ("Wrong", "Incomplete", "NaN", "Dies", "Raises"):
        assert "samples" not in case["sides"][name]
        assert all(name not in numbers for numbers in summary.values())
    assert "gradient of hidden states: error 1.0e-03" in case["sides"]["Wrong"]["reason"]
    assert "missing" in case["sides"]["Incomplete"]["reason"]
    assert "exit code 9. no more memory" in case["sides"]["Dies"]["reason"]
    assert "too large" in case["sides"]["Raises"]["reason"]
    assert summary["times_fastdpo"].keys() == {"plain PyTorch"}
    assert "incorrect: gradient of hidden states: error 1.0e-03" in capsys.readouterr().out


def test_a_side_that_runs_out_of_memory_is_a_result(in_process, run_cases, capsys):
    case = Case("a case", "group", (Side("plain", "sabotaged:NeedsMemory", WORK), head_side(SUBJECT)))
    plain, subject = run_cases("head", [case])["cases"][0]["sides"].values()
    assert (plain["status"], plain["reason"]) == ("out of memory", "tried to allocate 180 GiB")
    assert subject["status"] == "measured"
    assert "plain: out of memory: tried to allocate 180 GiB" in capsys.readouterr().out


def test_a_pattern_that_matches_no_case_is_an_error():
    with pytest.raises(SystemExit, match=r"--cases must match a case of head: .*; got 'nothing'"):
        run.main(["--suite", "head", "--quick", "--cases", "nothing"])


def test_a_run_ends_after_its_seconds(in_process, run_cases, monkeypatch, capsys):
    """With what it has: the sides that were checked in time, the passes over their batches that have begun, and no
    further case. What takes too long in another process ends.
    """
    seconds = 1000.0
    before = [0.0] * 6  # it begins, and a case, in which two sides are loaded and one is checked, and another not
    passes = [seconds + 1 if in_process else seconds - 0.2, seconds - 0.1, seconds + 1]
    clock = SimpleNamespace(monotonic=partial(next, itertools.chain(before[1:], passes, itertools.repeat(passes[-1]))))
    for module in (run, case_runner):
        monkeypatch.setattr(module, "time", clock)
    cases = [Case(name, "group", (head_side(SUBJECT), Side("slow", "sabotaged:Slow", WORK))) for name in ("a", "b")]
    began = time.monotonic()
    (case,) = run_cases("head", cases, "--rounds", "5", "--seconds", str(seconds), code=1)["cases"]
    assert time.monotonic() - began < 50
    assert len(case["sides"][SUBJECT]["samples"]) == 2
    assert case["sides"]["slow"]["status"] == "out of time"
    printed = capsys.readouterr().out
    assert "a: slow: out of time: --seconds are over" in printed
    assert "b: left out, since --seconds 1000 are over" in printed


def test_a_run_resumes_an_earlier_run(run_cases, monkeypatch):
    cases = [Case(name, "group", (head_side(SUBJECT),)) for name in ("a", "b")]
    monkeypatch.setattr(machine, "commit", lambda: "0" * 40)
    first = run_cases("head", cases, "--cases", "a", "--rounds", "1")
    monkeypatch.setattr(machine, "commit", lambda: "1" * 40)
    with pytest.raises(SystemExit, match="--resume: rounds must be 1, as in the file; got 2"):
        run_cases("head", cases, "--rounds", "2", "--resume")
    resumed = run_cases("head", cases, "--rounds", "1", "--resume")
    assert resumed["cases"][0] == first["cases"][0]
    assert [case["name"] for case in resumed["cases"]] == ["a", "b"]
    assert resumed["summary"]["cases"].keys() == {"a", "b"}
    assert resumed["command"].count("python -m benchmarks.run") == 2
    assert [case["commit"][0] for case in resumed["cases"]] == ["0", "1"]
    assert "commits 0000000 and 1111111." in tables.where(resumed).replace("\n", " ")
